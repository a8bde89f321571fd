#!/bin/bash
# A small Llama, in the arguments of Megatron-LM. `meshwright config import` reads it, and runs nothing.
GPUS_PER_NODE=4

MODEL_ARGS=(
    --num-layers 8 --hidden-size 512 --ffn-hidden-size 1408
    --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --seq-length 1024 --max-position-embeddings 1024
    --normalization RMSNorm --swiglu --position-embedding-type rope
    --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
TRAINING_ARGS=(
    --micro-batch-size 4 --global-batch-size 64 --train-iters 1000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 20
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --bf16
)
torchrun --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \
    --data-path corpus --tokenizer-type GPT2BPETokenizer --split 969,30,1
