// Working memory that outlives a call: fresh pages cost more than what is written to them.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_SCRATCH_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_SCRATCH_H_

#include <cstddef>

namespace mx {

// Memory of at least the size asked for, aligned to a cache line, with any content. What a call
// gives back is kept for the next one, 64 MiB at most.
class Scratch {
 public:
  explicit Scratch(size_t size);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* data() const { return data_; }

 private:
  char* data_;
  size_t size_;
};

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_SCRATCH_H_
