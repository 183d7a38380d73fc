"""A character-level language model in a loop of its own, after the documentation of nanoGPT.

Micro-batches, gradients clipped by hand, a learning rate set in every iteration, evaluation in between.
"""

import torch
from torch import nn
from torch.nn import functional

SIDE, WIDTH, LENGTH, BATCH, MICRO_BATCHES, UPDATES = 40, 48, 24, 4, 2, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.rest(self.between(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(SIDE, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SIDE, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, functional.cross_entropy(logits.view(-1, SIDE), targets.reshape(-1))


def get_batch():
    ids = torch.randint(SIDE, (BATCH, LENGTH + 1))
    return ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def estimate_loss():
    model.eval()
    found = torch.stack([model(*get_batch())[1] for _ in range(2)]).mean()
    model.train()
    return found


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = get_batch()
for update in range(UPDATES):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (update + 1) / UPDATES
    if update % 2 == 0:
        print(f"update {update}: {estimate_loss().item():.4f}")
    for _ in range(MICRO_BATCHES):
        _, loss = model(x, y)
        x, y = get_batch()
        (loss / MICRO_BATCHES).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "ckpt.pt")
