import torch

net = torch.nn.Linear(4, 1, device="cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
inputs = torch.zeros(64, 4, device="cuda")  # every replay reads this memory


def update():
    optimizer.zero_grad()
    loss = (net(inputs) - inputs.sum(-1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


side_stream = torch.cuda.Stream()
side_stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side_stream):
    for _ in range(3):  # warm-up
        update()
torch.cuda.current_stream().wait_stream(side_stream)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # capture: nothing is computed
    loss = update()

for _ in range(200):
    inputs.copy_(torch.randn(64, 4))  # new data, in the same memory
    graph.replay()
print(f"loss {loss.item():.4f}, weights", [round(weight, 2) for weight in net.weight.flatten().tolist()])
