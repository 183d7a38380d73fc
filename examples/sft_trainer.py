"""TRL's SFTTrainer within a budget, with its defaults and packing."""

from common import TEXTS, arguments, load
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from offmate.integrations.transformers import OffmateTrainerMixin


class OffmateSFTTrainer(OffmateTrainerMixin, SFTTrainer):
    """An SFTTrainer whose updates are part of the plan."""


args = arguments()
model, tokenizer = load(args.model)
settings = SFTConfig(
    args.output,
    per_device_train_batch_size=4,
    max_steps=args.steps,
    learning_rate=1e-3,
    max_length=64,
    packing=True,
    bf16=False,
    logging_steps=2,
    save_strategy="no",
    report_to=[],
)
trainer = OffmateSFTTrainer(
    model, settings, train_dataset=Dataset.from_dict({"text": TEXTS[:40]}), processing_class=tokenizer,
    gpu_budget=args.gpu_budget,
)  # fmt: skip
trainer.train()
print(trainer.model.offmate.plan)
