"""`accordion bench gpu`: what one accelerator shows, a module a part. It needs torch, numpy and safetensors alone."""
