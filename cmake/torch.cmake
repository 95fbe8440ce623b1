# torch from a Python wheel, as an imported target. The wheel's own Caffe2Config.cmake stops where no CUDA toolkit is found.
set(ASSAY_TORCH_VERSION 2.11.0)
execute_process(COMMAND ${ASSAY_PYTHON} -c "import importlib.util, os, importlib.metadata as m; print(os.path.dirname(importlib.util.find_spec('torch').origin)); print(m.version('torch'))"
                OUTPUT_VARIABLE found RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
if(failed)
  message(FATAL_ERROR "${ASSAY_PYTHON} has no torch; run `make` (it installs torch ${ASSAY_TORCH_VERSION}) or set ASSAY_PYTHON")
endif()
string(REPLACE "\n" ";" found "${found}")
list(GET found 0 TORCH_DIR)
list(GET found 1 TORCH_VERSION)
if(NOT TORCH_VERSION MATCHES "^2\\.11\\.0")
  message(FATAL_ERROR "torch ${TORCH_VERSION} found in ${TORCH_DIR}; this project is pinned to ${ASSAY_TORCH_VERSION}")
endif()
message(STATUS "torch ${TORCH_VERSION}: ${TORCH_DIR}")

add_library(torch INTERFACE)
# Searched last: the wheel brings headers of other libraries (fmt among them) in versions of its own.
target_compile_options(torch INTERFACE "SHELL:-idirafter ${TORCH_DIR}/include/torch/csrc/api/include"
                                       "SHELL:-idirafter ${TORCH_DIR}/include")
target_link_directories(torch INTERFACE ${TORCH_DIR}/lib)
set(torch_libraries -ltorch_cpu -lc10 -l:libgomp.so.1)
if(EXISTS ${TORCH_DIR}/lib/libtorch_cuda.so)   # linked though nothing refers to it: it registers the CUDA backend when loaded
  list(APPEND torch_libraries -Wl,--no-as-needed -ltorch_cuda -lc10_cuda -Wl,--as-needed)
endif()
target_link_libraries(torch INTERFACE ${torch_libraries})
target_link_options(torch INTERFACE -Wl,--allow-shlib-undefined)
if(NOT SKBUILD)  # Python loads torch first
  target_link_options(torch INTERFACE -Wl,-rpath,${TORCH_DIR}/lib)
endif()

# ProcessGroupGloo.hpp includes headers of Gloo that the wheel lacks; it needs the names of a few classes only.
foreach(header algorithm common/error context rendezvous/store transport/device)
  file(CONFIGURE OUTPUT ${GENERATED}/gloo/${header}.h CONTENT "#include \"train/gloo_names.h\"\n")
endforeach()
# NCCL's header is in a wheel of its own, next to torch.
set_source_files_properties(src/train/ranks.cc PROPERTIES COMPILE_OPTIONS "-idirafter;${TORCH_DIR}/../nvidia/nccl/include")

# One precompiled torch header, shared by every torch layer and test.
add_library(torch_pch OBJECT ${ASSAY_EMPTY})
target_link_libraries(torch_pch PRIVATE torch)
target_precompile_headers(torch_pch PRIVATE <torch/torch.h> <nlohmann/json.hpp>)

function(assay_reuse_pch program header)
  set_target_properties(${program} PROPERTIES POSITION_INDEPENDENT_CODE OFF)  # not -fPIE: the header was precompiled with
  target_compile_options(${program} PRIVATE -fPIC)                            # -fPIC
  target_precompile_headers(${program} REUSE_FROM ${header})
endfunction()
