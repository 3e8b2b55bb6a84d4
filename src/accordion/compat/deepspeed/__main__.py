"""Print the page of DeepSpeed's keys: `python -m accordion.compat.deepspeed > docs/compat_deepspeed.md`."""

from accordion.compat.deepspeed.keys import render

if __name__ == "__main__":
    print(render(), end="")
