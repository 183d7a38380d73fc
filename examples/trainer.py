"""transformers' Trainer within a budget: `OffmateTrainer`, or the mixin with your own Trainer.

Without a planned optimizer the Trainer needs no change at all: Trainer(model=offmate.compile(model, "12GiB"), ...).
"""

from common import arguments, load, rows
from transformers import TrainingArguments

from offmate.integrations.transformers import OffmateTrainer

args = arguments()
model, tokenizer = load(args.model)
data = rows(tokenizer)
settings = TrainingArguments(
    args.output,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=args.steps,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    optim="adamw_torch_fused",
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=4,
    save_steps=4,
    save_total_limit=2,
    report_to=[],
)
trainer = OffmateTrainer(
    model, settings, train_dataset=data[8:], eval_dataset=data[:8], processing_class=tokenizer,
    gpu_budget=args.gpu_budget,
)  # fmt: skip
trainer.train()
print(trainer.model.offmate.plan)
trainer.save_model()
