// SPDX-License-Identifier: Apache-2.0
// The list of queues, and the memory that waits for them.
#include "cpu/retired_memory.hpp"

#include <mutex>
#include <utility>

#include <sys/mman.h>

namespace helix::cpu {

/// Retired pages wait in batches. A batch waits for the tasks that were enqueued when its wait began;
/// meanwhile later pages gather for the next batch. So two numbers per queue suffice, however much is
/// retired.
class RetiredMemory {
 public:
  /// Never destroyed: queues and buffers may outlive every static object.
  static RetiredMemory& instance() {
    static auto* const memory = new RetiredMemory;
    return *memory;
  }

  void add(QueueProgress& queue) {
    const std::lock_guard lock(mutex_);
    queue.next_ = queues_;
    if (queues_ != nullptr) queues_->previous_ = &queue;
    queues_ = &queue;
  }

  void remove(QueueProgress& queue) {
    const std::lock_guard lock(mutex_);
    (queue.previous_ != nullptr ? queue.previous_->next_ : queues_) = queue.next_;
    if (queue.next_ != nullptr) queue.next_->previous_ = queue.previous_;
  }

  void retire(Pages* pages) {
    Pages* free_now = nullptr;
    {
      const std::lock_guard lock(mutex_);
      pages->next = std::exchange(gathering_, pages);
      // Sequentially consistent: a queue sees this after its last task, or take_free() sees that task
      // completed.
      is_waiting_.store(true, std::memory_order_seq_cst);
      free_now = take_free();
    }
    free_all(free_now);
  }

  void free_retired() {
    if (!is_waiting_.load(std::memory_order_seq_cst)) return;
    Pages* free_now = nullptr;
    {
      const std::lock_guard lock(mutex_);
      free_now = take_free();
    }
    free_all(free_now);
  }

 private:
  /// Takes the pages that no task can use any more.
  Pages* take_free() {
    Pages* free_now = nullptr;
    for (;;) {
      if (waiting_ == nullptr) {
        if (gathering_ == nullptr) break;
        waiting_ = std::exchange(gathering_, nullptr);
        for (QueueProgress* queue = queues_; queue != nullptr; queue = queue->next_)
          queue->target_ = queue->published.load(std::memory_order_seq_cst);
      }
      if (!has_passed()) break;
      Pages* last = waiting_;
      while (last->next != nullptr) last = last->next;
      last->next = std::exchange(free_now, std::exchange(waiting_, nullptr));
    }
    if (waiting_ == nullptr) is_waiting_.store(false, std::memory_order_seq_cst);
    return free_now;
  }

  bool has_passed() const {
    for (const QueueProgress* queue = queues_; queue != nullptr; queue = queue->next_)
      if (queue->completed.load(std::memory_order_seq_cst) < queue->target_) return false;
    return true;
  }

  static void free_all(Pages* pages) {
    while (pages != nullptr) {
      Pages* const next = pages->next;
      if (pages->data != nullptr) ::munmap(pages->data, pages->bytes);
      delete pages;
      pages = next;
    }
  }

  std::mutex mutex_;
  std::atomic<bool> is_waiting_ = false;  // whether any pages are retired
  QueueProgress* queues_ = nullptr;
  Pages* waiting_ = nullptr;    // waiting for every queue to reach its target
  Pages* gathering_ = nullptr;  // for the next batch
};

QueueProgress::QueueProgress() {
  RetiredMemory::instance().add(*this);
}

QueueProgress::~QueueProgress() {
  RetiredMemory::instance().remove(*this);
  free_retired();  // pages that waited for this queue's last task
}

void retire(Pages* pages) noexcept {
  RetiredMemory::instance().retire(pages);
}

void free_retired() noexcept {
  RetiredMemory::instance().free_retired();
}

}  // namespace helix::cpu
