//! Requests that a foreign library completes later, from its own threads.
//!
//! - [`RequestTable`]: outstanding requests by number, so that late, duplicate and foreign replies are
//!   recognized without dereferencing a pointer of the library.
//! - [`Budget`]: the limit of bytes that are lent to the library.

mod budget;
mod table;

pub use budget::{Budget, Charge};
pub use table::{RequestTable, RequestTables};
