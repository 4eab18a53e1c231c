"""Train a transformer without Hydra or Lightning's trainer, from a text to a map: `python train.py [TEXT_FILE]`."""

import sys
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch

from tinyformer import nn
from tinyformer.data import CharTokenizer
from tinyformer.model.model import Model
from tinyformer.tasks import CausalLM
from tinyformer.training.step import train_step

STEPS, BATCH, SEQ, D_MODEL = 300, 32, 64, 64

text = Path(sys.argv[1]).read_text(encoding="utf-8") if len(sys.argv) > 1 else "".join(topics.values())
tokenizer = CharTokenizer().build([text])
tokens = torch.tensor(tokenizer.encode(text))

torch.manual_seed(0)
attention = partial(nn.Attention, D_MODEL, num_heads=4, position=partial(nn.RotaryPosition, max_seq_len=SEQ))
block = partial(nn.PreNormBlock, D_MODEL, attention, partial(nn.FeedForward, D_MODEL), nn.LayerNorm)
encoder = nn.Encoder(tokenizer.vocab_size, 2, D_MODEL, SEQ, block, nn.LayerNorm, None)
network, task = nn.Transformer(encoder, nn.TokenReadout), CausalLM()
optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)

for step in range(1, STEPS + 1):
    starts = torch.randint(len(tokens) - SEQ, (BATCH,))
    windows = tokens[starts[:, None] + torch.arange(SEQ + 1)]  # (BATCH, SEQ + 1)
    loss = train_step(network, task, [{"inputs": windows[:, :-1], "targets": windows[:, 1:]}], optimizer)
    if step % 50 == 0:
        print(f"step {step}  loss {loss:.3f} nats per character", flush=True)

maps = Model(network.eval(), tokenizer, task).attention(text[: SEQ - 1])
maps.save("maps.html")
print("Open maps.html in a browser.")
