//! A snapshot shows the disk as it was, whatever is written meanwhile.

mod conformance;
mod limits;
mod random;
mod support;
mod view;
