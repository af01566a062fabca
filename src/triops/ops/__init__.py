"""One folder an operator: the public function, its reference, its kernels and its samples."""
