"""`accordion bench`: train one model under this engine and others (FSDP2, FSDP1, DDP, DeepSpeed), and measure each of them."""
