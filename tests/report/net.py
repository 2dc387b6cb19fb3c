"""A model file with sizes of its own, for the commands that write pages."""

BLOCK = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(self.up(x).relu())
"""
MODEL = (
    BLOCK
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

model = Net

def example_inputs(batch_size=2, sequence_length=16):
    return {"ids": torch.zeros(batch_size, sequence_length, dtype=torch.long)}
"""
)
