"""Divides a model among ranks: its sequences (context), its matrices (tensor) or its layers (pipeline).

context, ring, kernels         each rank has positions; attention over those of all
tensor, plan, layers           which matrices are divided, and what their layers do
boundary, crossing, divided    tensors that pass in and out of them; marks on parameters that are parts
vocabulary                     cross-entropy of divided logits
pipeline, cutting, shared      stages of layers; how a model is cut; parameters of several stages
schedules, stages              orders of micro-batches; torch's stages and schedules that follow them
alike                          ranks that divide a model read the same data
"""
