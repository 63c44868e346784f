#!/bin/bash
GPUS_PER_NODE=8
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 2 pretrain_gpt.py \
    ${PARALLEL_ARGS[@]} \
    --micro-batch-size 1 --global-batch-size 128 --seq-length 4096 \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \
    --bf16 --clip-grad 1.0 --lr 3e-4 --train-iters 500000
