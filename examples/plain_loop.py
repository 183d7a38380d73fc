"""An ordinary training loop within a budget: one extra line."""

import torch
from common import arguments, load, rows
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

import offmate

args = arguments()
model, tokenizer = load(args.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_cosine_schedule_with_warmup(optimizer, 2, args.steps)
loader = DataLoader(rows(tokenizer), batch_size=4, shuffle=True, drop_last=True)

model = offmate.compile(model, args.gpu_budget, optimizer=optimizer, max_grad_norm=1.0)
for step, batch in zip(range(args.steps), loader):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}, gradient norm {model.offmate.grad_norm.item():.3f}")

model.eval()
with torch.no_grad():
    print(f"evaluation: {model(**batch).loss.item():.4f}")
print(model.offmate.plan)
model.save_pretrained(args.output)
