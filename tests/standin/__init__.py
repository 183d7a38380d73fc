"""PyTorch's CUDA build over a stand-in for the CUDA runtime, on machines without a card.

Torch's allocator, dispatcher, autograd and optimizers are the real ones; kernels compute nothing, copies really copy,
and each stream has a clock. `make standin` makes an environment for it and runs the tests here, which run nowhere else.
"""
