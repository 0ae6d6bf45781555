"""Hardware and operating system: choice of device and dtype, CPU cores and threads, the C library's allocator."""
