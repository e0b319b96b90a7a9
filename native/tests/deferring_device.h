#pragma once

// A device that does nothing before it is waited for, as a GPU may: copies and graphs are made then, in their order, from
// and to where they were told.

#include "worker/worker.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

class deferring_device : public ggml_backend_device {
  public:
    deferring_device() : ggml_backend_device(*mesh::cpu_device()) {
        iface.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
        iface.get_host_buffer_type = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
        iface.init_backend = open;
    }

    // Results that were copied behind their graph.
    size_t copied() const {
        return copied_;
    }

  private:
    std::vector<std::function<void()>> waiting_;
    ggml_backend_ptr cpu_ = mesh::open_device(mesh::cpu_device(), 2);  // as host::compute
    std::atomic<size_t> copied_{0};

    static deferring_device & of(ggml_backend_t backend) {
        return *static_cast<deferring_device *>(backend->device);
    }

    static ggml_backend_t open(ggml_backend_dev_t device, const char * params) {
        ggml_backend_t made = ggml_backend_dev_init(mesh::cpu_device(), params);
        made->device = device;
        made->iface.set_tensor_async = [](ggml_backend_t backend, ggml_tensor * tensor, const void * data,
                                          size_t offset, size_t size) {
            of(backend).waiting_.emplace_back([copy = *tensor, data, offset, size] {
                std::memcpy(static_cast<uint8_t *>(copy.data) + offset, data, size);
            });
        };
        made->iface.get_tensor_async = [](ggml_backend_t backend, const ggml_tensor * tensor, void * data,
                                          size_t offset, size_t size) {
            ++of(backend).copied_;
            of(backend).waiting_.emplace_back([copy = *tensor, data, offset, size] {
                std::memcpy(data, static_cast<const uint8_t *>(copy.data) + offset, size);
            });
        };
        made->iface.graph_compute = [](ggml_backend_t backend, ggml_cgraph * graph) {
            // Of a part of a graph, the nodes outlive what it was handed over in.
            const auto part = std::make_shared<ggml_cgraph>(*graph);
            ggml_backend_t cpu = of(backend).cpu_.get();
            of(backend).waiting_.emplace_back([cpu, part] { ggml_backend_graph_compute(cpu, part.get()); });
            return GGML_STATUS_SUCCESS;
        };
        made->iface.synchronize = [](ggml_backend_t backend) {
            for (const auto & each : std::exchange(of(backend).waiting_, {})) {
                each();
            }
        };
        return made;
    }
};
