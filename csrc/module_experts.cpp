// The part of the Python module for experts. Inside of steps: it takes checked addresses.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "weight.h"

namespace kvilt {
namespace {

// The weights of all experts of a block. The caller keeps them, and the memory of the biases.
struct ExpertStack {
  std::shared_ptr<const std::vector<ExpertMaps>> maps;

  ExpertStack(const std::vector<const Weight*>& gates, const std::vector<const Weight*>& ups,
              const std::vector<const Weight*>& downs, const std::vector<Address>& gate_biases,
              const std::vector<Address>& up_biases, const std::vector<Address>& down_biases) {
    const size_t count = gates.size();
    for (size_t size : {ups.size(), downs.size(), gate_biases.size(), up_biases.size(), down_biases.size()})
      check(count > 0 && size == count, "each expert has three maps");
    auto all = std::make_shared<std::vector<ExpertMaps>>();
    for (size_t e = 0; e < count; ++e) {
      const PackedWeight &gate = gates[e]->packed, &up = ups[e]->packed, &down = downs[e]->packed;
      const PackedWeight& first = gates[0]->packed;
      const bool fits = gate.inputs == first.inputs && gate.outputs == first.outputs && up.inputs == first.inputs &&
                        up.outputs == first.outputs && down.inputs == first.outputs && down.outputs == first.inputs;
      check(fits, "the maps of experts must have one shape");
      all->push_back({gate, up, down, at<const float>(gate_biases[e]), at<const float>(up_biases[e]),
                      at<const float>(down_biases[e])});
    }
    maps = std::move(all);
  }
};

void route(KernelRunner& r, Address logits, Address bias, Address factors, int64_t tokens, int64_t experts,
           RouterScores scores, int64_t top_k, bool normalized, float epsilon, float floor, float scale, int64_t groups,
           int64_t top_groups, bool top_two, Address chosen, Address weights) {
  const bool possible = tokens >= 0 && top_k >= 1 && groups >= 1 && top_groups >= 1 && top_groups <= groups &&
                        experts % groups == 0 && top_k <= experts / groups * top_groups;
  check(possible, "so many experts cannot be chosen");
  const Routing how{scores, top_k, normalized, epsilon, floor, scale, groups, top_groups, top_two};
  const RouteArgs args{at<const float>(logits), at<const float>(bias), at<const float>(factors), tokens, experts, how,
                       at<int32_t>(chosen),     at<float>(weights)};
  r.run_and_record([=, &r] { r.route(args); });
}

void experts(KernelRunner& r, const ExpertStack& stack, Address x, int64_t tokens, Address chosen, Address weights,
             int64_t top_k, Activation activation, bool weigh_inputs, Address residual, Address shared,
             Address shared_gate, Address out) {
  check(tokens >= 0 && top_k >= 1, "each token has an expert");
  const ExpertsArgs args{stack.maps,
                         at<const float>(x),
                         tokens,
                         at<const int32_t>(chosen),
                         at<const float>(weights),
                         top_k,
                         activation,
                         weigh_inputs,
                         at<const float>(residual),
                         at<const float>(shared),
                         at<const float>(shared_gate),
                         at<float>(out)};
  r.run_and_record([=, &r] { r.experts(args); });
}

void sum_experts(KernelRunner& r, Address made, Address weights, int64_t tokens, int64_t top_k, int64_t hidden,
                 Address residual, Address shared, Address shared_gate, Address out) {
  const ExpertSumArgs args{at<const float>(made),
                           nullptr,
                           at<const float>(weights),
                           tokens,
                           top_k,
                           hidden,
                           at<const float>(residual),
                           at<const float>(shared),
                           at<const float>(shared_gate),
                           at<float>(out)};
  r.run_and_record([=, &r] { r.sum_experts(args); });
}

}  // namespace

void bind_experts(nb::module_& m, nb::class_<KernelRunner>& runner) {
  nb::enum_<RouterScores>(m, "RouterScores")
      .value("softmax", RouterScores::kSoftmax)
      .value("sigmoid", RouterScores::kSigmoid)
      .value("chosen_softmax", RouterScores::kChosenSoftmax)
      .value("chosen_sigmoid", RouterScores::kChosenSigmoid);
  nb::class_<ExpertStack>(m, "ExpertStack")
      .def(nb::init<const std::vector<const Weight*>&, const std::vector<const Weight*>&,
                    const std::vector<const Weight*>&, const std::vector<Address>&, const std::vector<Address>&,
                    const std::vector<Address>&>());
  runner.def("route", &route, Release())
      .def("experts", &experts, Release())
      .def("sum_experts", &sum_experts, Release());
}

}  // namespace kvilt
