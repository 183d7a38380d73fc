"""Accelerate's own loop within a budget: compile first, then prepare. The plan clips and accumulates."""

import torch
from accelerate import Accelerator
from common import arguments, load, rows
from torch.utils.data import DataLoader

import offmate

args = arguments()
accelerator = Accelerator(gradient_accumulation_steps=2)
model, tokenizer = load(args.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.steps)
loader = DataLoader(rows(tokenizer), batch_size=4, shuffle=True, drop_last=True)

model = offmate.compile(model, args.gpu_budget, optimizer=optimizer, max_grad_norm=1.0, accumulation_steps=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for step, batch in zip(range(2 * args.steps), loader):
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        # No accelerator.clip_grad_norm_ here: with max_grad_norm= above, the plan clips.
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.print(f"batch {step}: loss {loss.item():.4f}")

print(model.offmate.plan)
accelerator.unwrap_model(model).save_pretrained(args.output)
