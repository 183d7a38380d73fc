"""A low-rank adapter with peft: the frozen base streams through the device and is never copied back."""

import peft
import torch
from common import arguments, load, rows
from torch.utils.data import DataLoader

import offmate

args = arguments()
base, tokenizer = load(args.model)
model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
loader = DataLoader(rows(tokenizer), batch_size=4, shuffle=True, drop_last=True)

model = offmate.compile(model, args.gpu_budget, optimizer=optimizer)
for step, batch in zip(range(args.steps), loader):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")

print(model.offmate.plan)
model.save_pretrained(args.output)
