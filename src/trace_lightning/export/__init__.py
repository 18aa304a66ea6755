"""Policies as directories that other tools load: Hugging Face checkpoints, in high precision or in FP4.

source.py       where weights, recipe and tokenizer come from: a checkpoint of a run, or a directory
fp4.py          the tensors of an FP4 checkpoint, linear by linear
calibration.py  per-tensor scales of FP4 inputs
adapters.py     low-rank adapters: merged, beside their base, alone
kv.py           outer scales of K and V
record.py       `trace_export.json`: what a directory is
card.py         README.md
folder.py       whole directories, shards
exporter.py     all of it together
survival.py     how much of an update the FP4 weights show
command.py      `trace-fit export`
"""
