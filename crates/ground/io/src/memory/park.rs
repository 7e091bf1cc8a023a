//! Bytes that stay in the kernel: *parked* in a pipe, moved with splice(2), by reference if the
//! kernel can.
//!
//! A payload that is not inspected need not be copied to user space: page cache to pipe to socket,
//! or socket to pipe to file or another socket. Pipes are few and reused. A parked payload keeps
//! its [`Reservation`], so that there is memory if it is read after all ([`Parked::into_buf`]).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, OnceLock};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use super::buf::Buf;
use super::reservation::Reservation;
use super::route_counters::PayloadRoute;
use crate::sys::lend_pages;

/// Capacity requested for each pipe: the unprivileged maximum.
const PIPE_SIZE: usize = 1 << 20;
/// Maximum number of pipes: those that fit in 64 MiB, the limit of an unprivileged user.
const PIPES_MAX: usize = 64;
/// Minimum length of a parked payload: below, two splices cost more than a copy.
const PARK_MIN: usize = 64 << 10;
/// Maximum length of a parked payload: half a pipe, because socket data fills slots only in part.
const PARK_MAX: usize = PIPE_SIZE / 2;

struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
}

struct Pipes {
    idle: Vec<Pipe>,
    made: usize,
    /// The kernel has refused a pipe of this size: a user's limit is reached, or splice is
    /// forbidden.
    refused: bool,
}

static PIPES: Mutex<Pipes> = Mutex::new(Pipes { idle: Vec::new(), made: 0, refused: false });
static DISABLED: OnceLock<()> = OnceLock::new();

/// Turns parking off for the rest of the program (`--no-zero-copy`).
pub fn disable_parking() {
    // A second call changes nothing.
    let _ = DISABLED.set(());
}

fn take_pipe() -> Option<Pipe> {
    if DISABLED.get().is_some() {
        return None;
    }
    let mut pipes = PIPES.lock().expect("no panic under this lock");
    if let Some(pipe) = pipes.idle.pop() {
        return Some(pipe);
    }
    if pipes.made >= PIPES_MAX || pipes.refused {
        return None;
    }
    match make_pipe() {
        Ok(pipe) => {
            pipes.made += 1;
            Some(pipe)
        }
        Err(error) => {
            log::debug!("no more pipes to park payloads in: {error}");
            pipes.refused = true;
            None
        }
    }
}

fn make_pipe() -> rustix::io::Result<Pipe> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    if fcntl_setpipe_size(&write, PIPE_SIZE)? < PIPE_SIZE {
        return Err(Errno::PERM);
    }
    let pipe = Pipe { read, write };
    pipe.probe()?;
    Ok(pipe)
}

impl Pipe {
    /// Tries splice(2) with data that does not matter: some sandboxes refuse it.
    fn probe(&self) -> rustix::io::Result<()> {
        rustix::io::write(&self.write, &[0])?;
        match splice(&self.read, None, sink().ok_or(Errno::NOENT)?, None, 1, SpliceFlags::NONBLOCK)
        {
            Ok(1) => Ok(()),
            Ok(_) => Err(Errno::IO),
            Err(error) => Err(error),
        }
    }
}

/// A sink for unused data.
fn sink() -> Option<&'static std::fs::File> {
    static SINK: OnceLock<Option<std::fs::File>> = OnceLock::new();
    SINK.get_or_init(|| std::fs::File::options().write(true).open("/dev/null").ok()).as_ref()
}

/// A payload on its way into or out of a pipe.
pub struct Parked {
    /// `None` only while it is being dropped.
    pipe: Option<Pipe>,
    /// Bytes in the pipe.
    held: usize,
    room: Option<Reservation>,
    /// The bytes came from a file, not from a socket.
    from_file: bool,
}

impl Parked {
    /// An empty pipe for a payload of `room.len()` bytes, or the reservation if parking is not
    /// allowed, not worthwhile, or not possible now.
    pub fn begin(room: Reservation) -> Result<Parked, Reservation> {
        if !room.may_park() || !Parked::pays(room.len()) {
            return Err(room);
        }
        match take_pipe() {
            // Pages in a pipe are memory, too.
            Some(pipe) => {
                let room = Some(room.claim_now());
                Ok(Parked { pipe: Some(pipe), held: 0, room, from_file: false })
            }
            None => Err(room),
        }
    }

    /// Whether a payload of `len` bytes is worth a pipe and fits into one.
    pub(crate) fn pays(len: usize) -> bool {
        (PARK_MIN..=PARK_MAX).contains(&len) && DISABLED.get().is_none()
    }

    /// An empty pipe for the pages of a payload in memory.
    pub(super) fn empty() -> Option<Parked> {
        Some(Parked { pipe: Some(take_pipe()?), held: 0, room: None, from_file: false })
    }

    /// Adds pages of `bytes` by reference, as many as the pipe takes; returns the number of bytes.
    pub(super) fn lend(&mut self, bytes: &[u8]) -> rustix::io::Result<usize> {
        let lent = lend_pages(self.pipe().write.as_fd(), bytes)?;
        self.held += lent;
        Ok(lent)
    }

    /// Number of parked bytes.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Number of missing bytes.
    pub fn missing(&self) -> usize {
        self.room.as_ref().map_or(0, Reservation::len).saturating_sub(self.held)
    }

    fn pipe(&self) -> &Pipe {
        self.pipe.as_ref().expect("present until drop")
    }

    /// Parks the contents of `file` at offset `at`; waits for the disk if necessary. Fewer bytes
    /// than are missing mean the end of the file, or a full pipe.
    pub fn fill_from_file(&mut self, file: impl AsFd, at: u64) -> io::Result<usize> {
        let mut filled = 0;
        self.from_file = true;
        while self.missing() > 0 {
            let mut offset = at + filled as u64;
            let len = self.missing();
            let flags = SpliceFlags::NONBLOCK;
            match splice(&file, Some(&mut offset), &self.pipe().write, None, len, flags) {
                Ok(0) | Err(Errno::AGAIN) => break,
                Ok(moved) => {
                    self.held += moved;
                    filled += moved;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(filled)
    }

    /// Parks all of the bytes, which were already received: a pipe that takes `room.len()` bytes by
    /// reference also takes them as a copy.
    pub(crate) fn fill_from_bytes(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match rustix::io::write(&self.pipe().write, bytes) {
                Ok(written) => {
                    self.held += written;
                    bytes = &bytes[written..];
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Parks what the socket has; `WouldBlock`: no data, or the pipe is full. 0: end of stream.
    pub(crate) fn fill_from_stream(&mut self, stream: impl AsFd) -> io::Result<usize> {
        let len = self.missing();
        #[cfg(feature = "simulation")]
        let len = crate::simulation::splicing(stream.as_fd(), len)?;
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let moved = splice(stream, None, &self.pipe().write, None, len, flags)?;
        self.held += moved;
        Ok(moved)
    }

    /// Sends what the socket takes; `WouldBlock` if it takes nothing now.
    pub(crate) fn drain_to_stream(&mut self, stream: impl AsFd) -> io::Result<usize> {
        let len = self.held;
        #[cfg(feature = "simulation")]
        let len = crate::simulation::splicing(stream.as_fd(), len)?;
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let moved = splice(&self.pipe().read, None, stream, None, len, flags)?;
        self.held -= moved;
        self.count(
            moved,
            if self.from_file { PayloadRoute::FileToSocket } else { PayloadRoute::SocketToSocket },
        );
        Ok(moved)
    }

    /// Writes everything that is parked to `file` at offset `at`; waits if necessary.
    pub fn drain_to_file(&mut self, file: impl AsFd, at: u64) -> io::Result<()> {
        let mut offset = at;
        while self.held > 0 {
            let flags = SpliceFlags::MOVE;
            match splice(&self.pipe().read, None, &file, Some(&mut offset), self.held, flags) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(moved) => {
                    self.held -= moved;
                    let route = if self.from_file {
                        PayloadRoute::FileToFile
                    } else {
                        PayloadRoute::SocketToFile
                    };
                    self.count(moved, route);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn count(&self, moved: usize, route: PayloadRoute) {
        if let Some(counters) = self.room.as_ref().and_then(Reservation::counters) {
            counters.add(route, moved);
        }
    }

    /// Copies the parked bytes into a buffer of the payload's full length; the rest of it is not
    /// initialised by this. Returns the buffer and the number of bytes that were parked.
    pub fn into_buf(mut self) -> io::Result<(Buf, usize)> {
        let mut buf = self.memory();
        let held = self.held;
        self.copy_out(&mut buf[..held])?;
        Ok((buf, held))
    }

    /// Memory for the payload.
    fn memory(&mut self) -> Buf {
        let room = self.room.take().unwrap_or_else(|| Reservation::unpooled(self.held));
        room.into_buf()
    }

    /// Moves the first parked bytes to `bytes`, which is not longer than what is parked.
    fn copy_out(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        let mut copied = 0;
        while copied < bytes.len() {
            match rustix::io::read(&self.pipe().read, &mut bytes[copied..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    copied += read;
                    self.held -= read;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Writes `head` and then everything that is parked to `device` with one system call: a FUSE
    /// device takes a reply as a whole. `head` is at most a page. Never waits.
    ///
    /// Returns the payload in memory, to be written in another way, if it does not fit into a pipe
    /// together with `head`, or the kernel cannot write to `device` from a pipe.
    ///
    /// # Errors
    /// The device has refused the bytes, or the pipe fails. The bytes are lost.
    pub fn drain_whole(mut self, head: &[u8], device: impl AsFd) -> io::Result<Option<Buf>> {
        let Some(mut whole) = Parked::empty() else { return Ok(Some(self.into_buf()?.0)) };
        let len = self.held;
        whole.fill_from_bytes(head)?;
        let flags = SpliceFlags::NONBLOCK;
        while self.held > 0 {
            let rest = self.held;
            match splice(&self.pipe().read, None, &whole.pipe().write, None, rest, flags) {
                Ok(0) | Err(Errno::AGAIN) => break,
                Ok(moved) => {
                    self.held -= moved;
                    whole.held += moved;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut refused = None;
        while self.held == 0 && refused.is_none() {
            match splice(&whole.pipe().read, None, &device, None, whole.held, flags) {
                Ok(written) => {
                    whole.held -= written;
                    let all = whole.held == 0;
                    return if all { Ok(None) } else { Err(io::ErrorKind::WriteZero.into()) };
                }
                Err(Errno::INTR) => {}
                Err(error) => refused = Some(error),
            }
        }
        // A device that has looked at the bytes has also taken them out of the pipe.
        let lost = |error| refused.map_or(error, io::Error::from);
        let mut buf = self.memory();
        let moved = whole.held - head.len();
        whole.copy_out(&mut vec![0; head.len()]).map_err(lost)?;
        whole.copy_out(&mut buf[..moved]).map_err(lost)?;
        self.copy_out(&mut buf[moved..len])?;
        buf.truncate(len);
        Ok(Some(buf))
    }

    /// Empties the pipe and discards the bytes.
    fn discard(&mut self) {
        let Some(sink) = sink() else { return };
        while self.held > 0 {
            let flags = SpliceFlags::NONBLOCK;
            match splice(&self.pipe().read, None, sink, None, self.held, flags) {
                Ok(moved) if moved > 0 => self.held -= moved,
                _ => return,
            }
        }
    }
}

impl std::fmt::Debug for Parked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Parked({} bytes)", self.held)
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.discard();
        let Some(pipe) = self.pipe.take() else { return };
        let mut pipes = PIPES.lock().expect("no panic under this lock");
        // A pipe that could not be emptied is closed, as its bytes must not leak into another
        // payload.
        if self.held == 0 {
            pipes.idle.push(pipe);
        } else {
            pipes.made -= 1;
        }
    }
}
