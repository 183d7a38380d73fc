"""The programs, and the lines with which offmate trains them."""

from __future__ import annotations

from . import images, inputs
from .program import Line, Program

IMPORT = "import offmate"
BUDGET = '"2MiB"'
# What is free on the host depends on what else runs there.
_EMULATED = 'cpu_budget="1GiB", device="emulated"'
_COMPILE = f"model = offmate.compile(model, {BUDGET}, {_EMULATED})"

_TRAINER = (
    "--output_dir out --per_device_train_batch_size 2 --max_steps 4 --logging_steps 1 --save_steps 2 --report_to none "
    "--use_cpu --disable_tqdm true --learning_rate 1e-3 --seed 0"
)
_TRL = f"--model_name_or_path model --dataset_name data --max_length 64 {_TRAINER} --eval_strategy steps --eval_steps 2"


def _planned(kind: str, after: str, model: str, budget: str = BUDGET) -> tuple[Line, ...]:
    """The lines that make a trainer's class a planned one."""
    return (
        Line(after, "from offmate.integrations.transformers import OffmateTrainerMixin"),
        Line(
            "from offmate.integrations.transformers import OffmateTrainerMixin",
            f'{kind} = type("{kind}", (OffmateTrainerMixin, {kind}), {{}})',
        ),
        Line(model, f"gpu_budget={budget}, {_EMULATED},"),
    )


_SFT = _planned(
    "SFTTrainer",
    "from trl import SFTTrainer, get_dataset, get_peft_config, get_quantization_config",
    "model=model_args.model_name_or_path,",
)
_DPO_IMPORT = "from trl import DPOTrainer, get_dataset, get_peft_config, get_quantization_config"
_DPO_MODEL = "model=model_args.model_name_or_path,"

_NANOGPT = (
    "--dataset=tiny --device=cpu --compile=False --dtype=float32 --n_layer=3 --n_head=4 --n_embd=64 --block_size=32 "
    "--batch_size=4 --max_iters=4 --eval_interval=2 --eval_iters=2 --dropout=0.1 --gradient_accumulation_steps=2"
)

PROGRAMS = (
    Program(
        "transformers: run_clm.py", "transformers", "examples/pytorch/language-modeling/run_clm.py",
        lines=(
            Line(
                "from transformers.utils import check_min_version",
                "from offmate.integrations.transformers import OffmateTrainer as Trainer",
            ),
            Line("model=model,", f"gpu_budget={BUDGET}, {_EMULATED},"),
        ),
        arguments="--model_name_or_path model --train_file texts.txt --do_train --do_eval --block_size 64 "
        f"--max_eval_samples 8 {_TRAINER}",
        inputs=inputs.texts, needs=("datasets",),
    ),
    Program(
        "TRL: sft.py", "trl", "scripts/sft.py", lines=_SFT,
        arguments=f"{_TRL} --bf16 false", inputs=inputs.rows_of_text, needs=("trl", "datasets"),
    ),
    Program(
        "TRL: sft.py, LoRA, packed", "trl", "scripts/sft.py", lines=_SFT,
        arguments=f"{_TRL} --bf16 false --use_peft --lora_r 8 --packing",
        inputs=inputs.rows_of_text, needs=("trl", "datasets", "peft"),
    ),
    Program(
        "TRL: dpo.py", "trl", "scripts/dpo.py",
        # The reference model's head, which the plan does not see, takes 32 MiB between a forward and its backward.
        lines=_planned("DPOTrainer", _DPO_IMPORT, _DPO_MODEL, '"40MiB"'),
        arguments=f"{_TRL} --bf16 false", inputs=inputs.preferences, needs=("trl", "datasets"),
    ),
    Program(
        "TRL: dpo.py, LoRA", "trl", "scripts/dpo.py", lines=_planned("DPOTrainer", _DPO_IMPORT, _DPO_MODEL),
        arguments=f"{_TRL} --bf16 false --use_peft --lora_r 8",
        inputs=inputs.preferences, needs=("trl", "datasets", "peft"),
    ),
    Program(
        "Accelerate: complete_nlp_example.py", "accelerate", "examples/complete_nlp_example.py",
        lines=(
            Line("import torch", IMPORT),
            Line(
                "optimizer = AdamW(params=model.parameters(), lr=lr)",
                f'offmate.compile(model, "5MiB", optimizer=optimizer, {_EMULATED})',
            ),
        ),
        arguments="--cpu --checkpointing_steps epoch --output_dir out",
        inputs=inputs.pairs_of_sentences, needs=("datasets",),
    ),
    Program(
        "nanoGPT: train.py", "nanoGPT", "train.py",
        lines=(
            Line("import torch", IMPORT),
            Line(
                "optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device_type)",
                _COMPILE,
            ),
        ),
        arguments=_NANOGPT,
        inputs=inputs.characters, beside=("model.py", "configurator.py"),
    ),
    Program(
        "nanoGPT: train.py, planned updates", "nanoGPT", "train.py",
        lines=(
            Line("import torch", IMPORT),
            Line(
                "optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device_type)",
                f"offmate.compile(model, {BUDGET}, optimizer=optimizer, accumulation_steps=2, {_EMULATED})",
            ),
        ),
        arguments=f"{_NANOGPT} --grad_clip=0.0",
        inputs=inputs.characters, beside=("model.py", "configurator.py"),
    ),
    Program(
        "PEFT: sft/train.py", "peft", "examples/sft/train.py",
        lines=_planned("SFTTrainer", "from trl import SFTConfig, SFTTrainer", "model=model,"),
        arguments=f"--model_name_or_path model --dataset_name data --use_peft_lora --lora_r 8 --max_length 64 "
        f"{_TRAINER} --eval_strategy steps --eval_steps 2 --bf16 false",
        inputs=inputs.rows_of_text, needs=("trl", "datasets", "peft"), beside=("utils.py",),
    ),
    Program(
        "timm: train.py", "pytorch-image-models", "train.py",
        lines=(
            Line("import torch", IMPORT),
            Line(
                "# optionally resume from a checkpoint",
                f'offmate.compile(model, "8MiB", optimizer=optimizer, {_EMULATED})',
            ),
        ),
        arguments="--data-dir images --model test_vit --num-classes 2 --batch-size 4 --epochs 2 --no-prefetcher "
        "--workers 0 --device cpu --opt adamw --output out --experiment one",
        inputs=images.classes, needs=("timm", "torchvision"),
    ),
    Program(
        "timm: train.py, convolutions and an average of the weights", "pytorch-image-models", "train.py",
        lines=(
            Line("import torch", IMPORT),
            Line(
                "# optionally resume from a checkpoint",
                f'offmate.compile(model, "8MiB", optimizer=optimizer, max_grad_norm=float("inf"), {_EMULATED})',
            ),
        ),
        arguments="--data-dir images --model test_resnet --img-size 64 --num-classes 2 --batch-size 4 --epochs 2 "
        "--no-prefetcher --workers 0 --device cpu --opt sgd --momentum 0.9 --model-ema --output out --experiment one",
        inputs=images.classes, needs=("timm", "torchvision"),
    ),
    Program(
        "diffusers: train_text_to_image_lora.py", "diffusers", "examples/text_to_image/train_text_to_image_lora.py",
        lines=(
            Line("import torch", IMPORT),
            Line(
                "num_warmup_steps_for_scheduler = args.lr_warmup_steps * accelerator.num_processes",
                f'offmate.compile(unet, "8MiB", {_EMULATED})',
            ),
        ),
        arguments="--pretrained_model_name_or_path model --train_data_dir images --resolution 32 --train_batch_size 2 "
        "--max_train_steps 4 --checkpointing_steps 2 --learning_rate 1e-2 --seed 0 --output_dir out --rank 4 "
        "--report_to tensorboard",
        inputs=images.captions, needs=("diffusers", "torchvision", "peft"),
    ),
    Program(
        "a loop after nanoGPT", "here", "here/gpt_loop.py",
        lines=(
            Line("import torch", IMPORT),
            Line("optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)", _COMPILE),
        ),
        arguments="", inputs=inputs.nothing,
    ),
    Program(
        "a loop after Accelerate's documentation", "here", "here/accelerate_loop.py",
        lines=(
            Line("import torch", IMPORT),
            Line("optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)", _COMPILE),
        ),
        arguments="", inputs=inputs.pairs_of_sentences, needs=("accelerate",),
    ),
)  # fmt: skip
