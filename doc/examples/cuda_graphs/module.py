import torch
from tensordict.nn import CudaGraphModule

net = torch.nn.Linear(4, 1, device="cuda")
optimizer = torch.optim.Adam(net.parameters(), lr=0.02, capturable=True)


def update(inputs):
    optimizer.zero_grad()
    loss = (net(inputs) - inputs.sum(-1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


update = CudaGraphModule(update, warmup=3)  # captured in the third call
for _ in range(1000):
    loss = update(torch.randn(64, 4, device="cuda"))
print(f"loss {loss.item():.4f}, weights", [round(weight, 2) for weight in net.weight.flatten().tolist()])
