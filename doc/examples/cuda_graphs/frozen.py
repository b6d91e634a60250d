import torch

rate = 1.0
rate_tensor = torch.tensor(1.0, device="cuda")
in_place = torch.zeros((), device="cuda")
first = rebound = torch.zeros((), device="cuda")  # `first` keeps the memory that the graph reads
calls = 0

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    calls += 1
    by_number = rate * torch.ones((), device="cuda")
    by_tensor = rate_tensor * torch.ones((), device="cuda")
    by_branch = -rate_tensor if rate > 5 else rate_tensor.clone()
    by_where = torch.where(rate_tensor > 5, -rate_tensor, rate_tensor)
    in_place.add_(1)
    rebound = rebound + 1
    noise = torch.rand((), device="cuda")

rate = 10.0
rate_tensor.fill_(10.0)
draws = set()
for _ in range(3):
    graph.replay()
    draws.add(noise.item())

print(f"rate is 10: a number gives {by_number.item()}, a tensor {by_tensor.item()}")
print(f"minus 10: a branch gives {by_branch.item()}, torch.where {by_where.item()}")
print(f"three replays: in place {in_place.item()}, rebound {rebound.item()}, counted in Python {calls}")
print(f"different random numbers: {len(draws)}")
