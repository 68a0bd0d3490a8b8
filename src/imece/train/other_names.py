"""What other trainers call the values of a run, for whoever types one of their names."""

from __future__ import annotations

OURS = {
    theirs: ours
    for ours, names in {
        "run": "output-dir out-dir resume resume-from-checkpoint",
        "steps": "max-steps",
        "epochs": "num-train-epochs num-epochs max-epochs",
        "strategy": "deepspeed fsdp",
        "model.weights": "model-name-or-path pretrained-model-name-or-path checkpoint-dir",
        "model.max-seq": "seq-len seq-length block-size max-length max-seq-length max-seq-len",
        "data.weights": "data-weights mixture-weights dataset-weights interleave-probs",
        "data.validation": "validation-file validation-files val-data eval-data",
        "data.held-out": "val-split validation-split-percentage",
        "batch.sequences": "batch-size train-batch-size global-batch-size",
        "batch.micro": "micro-batch-size per-device-train-batch-size gradient-accumulation-steps",
        "optimizer.lr": "learning-rate",
        "optimizer.schedule": "lr-scheduler lr-scheduler-type",
        "optimizer.warmup": "warmup-steps warmup-ratio",
        "optimizer.clip": "max-grad-norm gradient-clip-val gradient-clipping",
        "lora.quantize": "quantize load-in-4bit",
        "compute.dtype": "bf16 fp16 precision mixed-precision",
        "compute.recompute": "gradient-checkpointing activation-checkpointing",
        "validate.every": "eval-steps eval-interval val-check-interval",
        "validate.patience": "patience early-stopping-patience",
        "checkpoint.every": "save-steps save-interval",
        "checkpoint.keep": "save-total-limit save-top-k",
    }.items()
    for theirs in names.split()
}
"""Ours by theirs, as options are written, without dashes in front."""
