//! Bytes that stay in the kernel: *parked* in a pipe, moved there and away by splice(2), by reference
//! where the kernel can.
//!
//! A payload that nobody looks at need not come to user space: a file's page cache parks, a socket
//! sends; a socket parks, a file or another socket takes. Pipes are few and reused, and a parked
//! payload keeps its [`Reservation`], so that whoever does look ([`Parked::into_buf`]) has memory for it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, OnceLock};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use super::buf::Buf;
use super::reservation::Reservation;
use super::route_counters::PayloadRoute;
use crate::sys::lend_pages;

/// Capacity asked for each pipe: the most that a process without privilege gets.
const PIPE_SIZE: usize = 1 << 20;
/// Pipes in all: what 64 MiB, the limit of a user without privilege, allows.
const PIPES_MAX: usize = 64;
/// Shortest payload that is worth parking: below, two splices cost more than a copy.
const PARK_MIN: usize = 64 << 10;
/// Longest payload that is parked: half a pipe, because socket data fills slots only in part.
const PARK_MAX: usize = PIPE_SIZE / 2;

struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
}

struct Pipes {
    idle: Vec<Pipe>,
    made: usize,
    /// The kernel refused a pipe of this size once: a user's limit is reached, or splice is forbidden.
    refused: bool,
}

static PIPES: Mutex<Pipes> = Mutex::new(Pipes { idle: Vec::new(), made: 0, refused: false });
static DISABLED: OnceLock<()> = OnceLock::new();

/// Turns parking off for the rest of the program (`--no-zero-copy`).
pub fn disable_parking() {
    // Saying it twice changes nothing.
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
    /// Tries splice(2) where nothing can be lost: some sandboxes refuse it.
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

/// Takes what nobody wants.
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
    /// An empty pipe for a payload of `room.len()` bytes, or the room back when parking is not allowed,
    /// not worth it, or not possible now.
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

    /// An empty pipe, for the pages of a payload in memory.
    pub(super) fn empty() -> Option<Parked> {
        Some(Parked { pipe: Some(take_pipe()?), held: 0, room: None, from_file: false })
    }

    /// Adds pages of `bytes` by reference, as many as the pipe takes; gives how many bytes.
    pub(super) fn lend(&mut self, bytes: &[u8]) -> rustix::io::Result<usize> {
        let lent = lend_pages(self.pipe().write.as_fd(), bytes)?;
        self.held += lent;
        Ok(lent)
    }

    /// Bytes that are parked now.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Bytes that are still missing.
    pub fn missing(&self) -> usize {
        self.room.as_ref().map_or(0, Reservation::len).saturating_sub(self.held)
    }

    fn pipe(&self) -> &Pipe {
        self.pipe.as_ref().expect("present until drop")
    }

    /// Parks what `file` holds at offset `at`; waits for the disk where it must. Fewer bytes than are
    /// missing mean the end of the file, or a pipe that is full.
    pub fn fill_from_file(&mut self, file: impl AsFd, at: u64) -> io::Result<usize> {
        let mut filled = 0;
        self.from_file = true;
        while self.missing() > 0 {
            let mut offset = at + filled as u64;
            let (len, flags) = (self.missing(), SpliceFlags::NONBLOCK);
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

    /// Parks bytes that were received already. All of them: a pipe that takes `room.len()` bytes by
    /// reference takes them as a copy.
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

    /// Parks what the socket has; `WouldBlock`: nothing there, or the pipe is full. 0: end of stream.
    pub(crate) fn fill_from_stream(&mut self, stream: impl AsFd) -> io::Result<usize> {
        let len = self.missing();
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let moved = splice(stream, None, &self.pipe().write, None, len, flags)?;
        self.held += moved;
        Ok(moved)
    }

    /// Sends what the socket takes; `WouldBlock` when it takes nothing now.
    pub(crate) fn drain_to_stream(&mut self, stream: impl AsFd) -> io::Result<usize> {
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let moved = splice(&self.pipe().read, None, stream, None, self.held, flags)?;
        self.held -= moved;
        self.count(
            moved,
            if self.from_file { PayloadRoute::FileToSocket } else { PayloadRoute::SocketToSocket },
        );
        Ok(moved)
    }

    /// Writes everything that is parked to `file` at offset `at`; waits where it must.
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

    /// Copies what is parked into a buffer of the payload's full length; what is missing is left as
    /// the pool had it. Returns the buffer and the number of bytes that were parked.
    pub fn into_buf(mut self) -> io::Result<(Buf, usize)> {
        let room = self.room.take().unwrap_or_else(|| Reservation::unpooled(self.held));
        let mut buf = room.into_buf();
        let mut copied = 0;
        while self.held > 0 {
            match rustix::io::read(&self.pipe().read, &mut buf[copied..copied + self.held]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => {
                    copied += bytes;
                    self.held -= bytes;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok((buf, copied))
    }

    /// Empties the pipe without looking.
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
        // A pipe that could not be emptied is closed: its bytes must not reach anybody else.
        if self.held == 0 {
            pipes.idle.push(pipe);
        } else {
            pipes.made -= 1;
        }
    }
}
