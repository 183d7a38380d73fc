"""Classes of sentences in Accelerate's loop, after its documentation: prepare, accumulate, clip, gather, save."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup, set_seed

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)
rows = [{"input_ids": torch.randint(3, 300, (16,)), "labels": torch.tensor(index % 2)} for index in range(20)]
model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader, evaluated = DataLoader(rows, batch_size=3, shuffle=True), DataLoader(rows[:6], batch_size=3)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 8)
model, optimizer, loader, evaluated, schedule = accelerator.prepare(model, optimizer, loader, evaluated, schedule)
for _ in range(2):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    for batch in evaluated:
        with torch.no_grad():
            found = model(**batch).logits.argmax(-1)
        print(accelerator.gather_for_metrics((found, batch["labels"])))
accelerator.save_state("out")
accelerator.save_model(model, "saved")
