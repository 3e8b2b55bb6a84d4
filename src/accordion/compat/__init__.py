"""Interfaces of FSDP2, FSDP1 and DeepSpeed, run by Accordion's engine: a program changes its imports and nothing else."""
