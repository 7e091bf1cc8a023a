//! The memory of requests: bounded in total, owned by the request, and copied as little as
//! possible.

mod alignment;
mod block;
mod buf;
mod charge;
mod data;
mod lend;
mod park;
mod pool;
mod reservation;
mod route_counters;
mod shared;

pub use self::alignment::ALIGN;
pub(crate) use self::block::{AlignedBlock, PageOwner};
pub use self::buf::Buf;
pub use self::data::Data;
pub use self::lend::LentPayload;
pub(crate) use self::lend::PayloadLoan;
pub use self::park::{ParkedPayload, disable_parking};
pub use self::pool::{Pool, TooLarge};
pub use self::reservation::{KeptReservation, Reservation};
pub use self::route_counters::{PayloadRoute, RouteCounters};
pub use self::shared::{SharedMemory, SharedPart};
