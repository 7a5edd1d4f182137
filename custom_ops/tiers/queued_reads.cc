#include "paddle_kv/tiers/queued_reads.h"

#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace paddle_kv {
namespace {

constexpr std::size_t kDepth = 64;

// The queue of a thread. A forked child has none: it is told so by the first call.
class Queue {
 public:
  Queue() { works_ = syscall(SYS_io_setup, kDepth, &id_) == 0; }
  ~Queue() {
    if (works_) syscall(SYS_io_destroy, id_);
  }
  Queue(const Queue&) = delete;

  // How many of them were taken.
  std::size_t Submit(iocb** first, std::size_t count) {
    if (!works_) return 0;
    return static_cast<std::size_t>(std::max(0L, syscall(SYS_io_submit, id_, static_cast<long>(count), first)));
  }

  // Waits for one of those under way at least.
  std::size_t Collect(io_event* events) {
    for (;;) {
      const long count = syscall(SYS_io_getevents, id_, 1L, static_cast<long>(kDepth), events, nullptr);
      if (count > 0) return static_cast<std::size_t>(count);
    }
  }

 private:
  aio_context_t id_ = 0;
  bool works_ = false;
};

}  // namespace

void ReadQueued(std::vector<QueuedRead>* reads) {
  static thread_local Queue queue;
  const std::size_t count = reads->size();
  std::vector<iocb> blocks(count);
  std::vector<iocb*> pointers(count);
  for (std::size_t i = 0; i < count; ++i) {
    const QueuedRead& read = (*reads)[i];
    blocks[i].aio_data = i;
    blocks[i].aio_lio_opcode = IOCB_CMD_PREADV;
    blocks[i].aio_fildes = static_cast<std::uint32_t>(read.descriptor);
    blocks[i].aio_buf = reinterpret_cast<std::uintptr_t>(read.buffers);
    blocks[i].aio_nbytes = read.buffer_count;
    blocks[i].aio_offset = read.offset;
    pointers[i] = &blocks[i];
  }
  std::size_t end = count, submitted = 0, collected = 0;
  io_event events[kDepth];
  while (collected < submitted || submitted < end) {
    const std::size_t room = std::min(kDepth - (submitted - collected), end - submitted);
    const std::size_t taken = room == 0 ? 0 : queue.Submit(&pointers[submitted], room);
    submitted += taken;
    if (taken == 0 && room > 0) end = submitted;  // the rest stays as it is
    if (collected == submitted) continue;
    const std::size_t arrived = queue.Collect(events);
    for (std::size_t i = 0; i < arrived; ++i) {
      QueuedRead& read = (*reads)[events[i].data];
      read.whole = events[i].res == read.bytes;
    }
    collected += arrived;
  }
}

}  // namespace paddle_kv
