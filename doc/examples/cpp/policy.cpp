// Runs a compiled policy without Python: prints its actions for one observation.
//
//     ./policy COMPILED_POLICY NUMBER...

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

int main(int argc, char** argv) try {
  if (argc < 3) {
    std::cerr << "usage: " << argv[0] << " COMPILED_POLICY NUMBER...\n";
    return 2;
  }
  std::vector<float> numbers;
  for (int i = 2; i < argc; ++i) {
    numbers.push_back(std::stof(argv[i]));
  }

  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);  // without it, a wrong shape can read out of bounds
  torch::inductor::AOTIModelPackageLoader policy(argv[1]);
  at::Tensor observations = at::tensor(numbers).unsqueeze(0);  // (1, obs_dim)
  at::Tensor actions = policy.run({observations})[0];  // (1, act_dim) or (1,)

  std::cout.precision(9);
  actions = actions.flatten().to(at::kDouble);
  for (int i = 0; i < actions.numel(); ++i) {
    std::cout << actions[i].item<double>() << "\n";
  }
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
