"""Where a request's next block comes from: `paged`, and the policies it is compared with."""
