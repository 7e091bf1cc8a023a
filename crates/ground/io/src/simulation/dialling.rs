//! What a simulation does to new connections.

use std::io;

use rustix::io::Errno;

use super::world;

/// Delays a connection, or refuses it.
pub(crate) async fn dialling() -> io::Result<()> {
    let drawn = world::with(|world| {
        let delay = world.delay(world.faults.socket_delay);
        (delay, world.choose("refuse", world.faults.refuse * 100))
    });
    let Some((delay, refused)) = drawn else { return Ok(()) };
    crate::sleep(delay).await;
    if refused { Err(Errno::CONNREFUSED.into()) } else { Ok(()) }
}
