// SPDX-License-Identifier: Apache-2.0
// The core: include this and cpu/backend.hpp (or your own). What connects processes (comm/) and the planner
// (plan/) are apart.
#pragma once

#include <helix/backend.hpp>
#include <helix/batch_buffer.hpp>
#include <helix/decode_layer.hpp>
#include <helix/foreign_kv.hpp>
#include <helix/job_comms.hpp>
#include <helix/lse_combine.hpp>
#include <helix/page_ledger.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/topology.hpp>
#include <helix/version.hpp>
#include <helix/vocabulary.hpp>
