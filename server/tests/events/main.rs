//! Publisher, subscriber, discovery and router over real sockets and folders.

mod etcd;
mod follow;
mod kubernetes;
mod membership;
mod support;
