# CMake toolchain for Linux on aarch64, such as Grace Hopper: the compiler of the package ziglang, as python-zig on PATH.
# It has headers and stubs of glibc 2.28 and links its C++ library statically.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER python-zig)
set(CMAKE_CXX_COMPILER_ARG1 "c++ -target aarch64-linux-gnu.2.28")
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(CMAKE_STRIP "") # that of the system knows one machine
