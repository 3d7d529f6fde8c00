"""twinflow inside other people's loops: Hugging Face's Trainer and Accelerate, and Lightning. None of them is needed
by the rest of twinflow; each is imported with the module that is named after it."""
