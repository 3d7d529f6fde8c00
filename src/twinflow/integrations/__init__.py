"""twinflow in the training loops of Hugging Face's Trainer, of Accelerate and of Lightning. The rest of twinflow does
not need these packages. Each is imported only by the module of its name.
"""
