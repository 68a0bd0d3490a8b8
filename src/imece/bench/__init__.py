"""The benchmarks of `imece bench`, and measurements that `imece doctor` and `imece plan --here` use."""
