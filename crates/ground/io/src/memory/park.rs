//! Bytes that stay in the kernel: *parked* in pipes, moved with splice(2), by reference if the
//! kernel can.
//!
//! A payload that is not inspected need not be copied to user space: page cache to pipe to socket,
//! or socket to pipe to file or another socket. Pipes are few and reused; a long payload takes several. A
//! parked payload keeps its [`Reservation`], so that there is memory if it is read after all
//! ([`ParkedPayload::into_buf`]).

use std::collections::VecDeque;
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
/// What a pipe is expected to take: half of its capacity, because socket data fills slots only in part.
const SHARE: usize = PIPE_SIZE / 2;
/// Maximum length of a parked payload, in several pipes: above, a copy is a small part of the cost, and
/// few such payloads would use all pipes.
const PARK_MAX: usize = 8 * SHARE;

struct PayloadPipe {
    read: OwnedFd,
    write: OwnedFd,
}

/// A pipe of a payload.
struct FilledPipe {
    pipe: PayloadPipe,
    /// Bytes in the pipe.
    bytes: usize,
}

struct PipePool {
    idle: Vec<PayloadPipe>,
    made: usize,
    /// The kernel has refused a pipe of this size: a user's limit is reached, or splice is
    /// forbidden.
    refused: bool,
}

static PIPES: Mutex<PipePool> = Mutex::new(PipePool { idle: Vec::new(), made: 0, refused: false });
static DISABLED: OnceLock<()> = OnceLock::new();

/// Turns parking off for the rest of the program (`--no-zero-copy`).
pub fn disable_parking() {
    // A second call changes nothing.
    let _ = DISABLED.set(());
}

/// Empty pipes for `len` bytes, all or none.
fn take_pipes(len: usize) -> Option<VecDeque<FilledPipe>> {
    if DISABLED.get().is_some() {
        return None;
    }
    let count = len.div_ceil(SHARE).max(1);
    let mut pipes = PIPES.lock().expect("no panic under this lock");
    while pipes.idle.len() < count {
        if pipes.made >= PIPES_MAX || pipes.refused {
            return None;
        }
        match make_pipe() {
            Ok(pipe) => {
                pipes.made += 1;
                pipes.idle.push(pipe);
            }
            Err(error) => {
                log::debug!("no more pipes to park payloads in: {error}");
                pipes.refused = true;
            }
        }
    }
    let rest = pipes.idle.len() - count;
    Some(pipes.idle.drain(rest..).map(|pipe| FilledPipe { pipe, bytes: 0 }).collect())
}

fn make_pipe() -> rustix::io::Result<PayloadPipe> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    if fcntl_setpipe_size(&write, PIPE_SIZE)? < PIPE_SIZE {
        return Err(Errno::PERM);
    }
    let pipe = PayloadPipe { read, write };
    pipe.probe()?;
    Ok(pipe)
}

impl PayloadPipe {
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

/// A payload on its way into or out of pipes.
pub struct ParkedPayload {
    /// In the order of the bytes. Empty ones leave, except those that are still to be filled.
    pipes: VecDeque<FilledPipe>,
    /// The pipe that is filled next.
    filling: usize,
    /// Bytes in all pipes.
    held: usize,
    room: Option<Reservation>,
    /// The bytes came from a file, not from a socket.
    from_file: bool,
}

impl ParkedPayload {
    /// Empty pipes for a payload of `room.len()` bytes, or the reservation if parking is not
    /// allowed, not worthwhile, or not possible now.
    ///
    /// # Errors
    /// The reservation, if the payload cannot be parked.
    pub fn begin(room: Reservation) -> Result<ParkedPayload, Reservation> {
        if !room.may_park() || !ParkedPayload::pays(room.len()) {
            return Err(room);
        }
        match take_pipes(room.len()) {
            // Pages in a pipe are memory, too.
            Some(pipes) => Ok(ParkedPayload::with(pipes, Some(room.claim_now()))),
            None => Err(room),
        }
    }

    fn with(pipes: VecDeque<FilledPipe>, room: Option<Reservation>) -> ParkedPayload {
        ParkedPayload { pipes, filling: 0, held: 0, room, from_file: false }
    }

    /// Whether a payload of `len` bytes is worth pipes, and not too long.
    pub(crate) fn pays(len: usize) -> bool {
        (PARK_MIN..=PARK_MAX).contains(&len) && DISABLED.get().is_none()
    }

    /// Whether a payload of `len` bytes fits into one pipe, as [`ParkedPayload::drain_whole`] needs it.
    pub fn fits_one_pipe(len: usize) -> bool {
        len <= SHARE
    }

    /// Empty pipes for the pages of a payload of `len` bytes in memory.
    pub(super) fn empty(len: usize) -> Option<ParkedPayload> {
        Some(ParkedPayload::with(take_pipes(len)?, None))
    }

    /// Adds pages of `bytes` by reference, as many as the next pipe takes; returns the number of bytes.
    pub(super) fn lend(&mut self, bytes: &[u8]) -> rustix::io::Result<usize> {
        loop {
            let next = self.pipes.get(self.filling).ok_or(Errno::AGAIN)?;
            match lend_pages(next.pipe.write.as_fd(), bytes) {
                // Full.
                Err(Errno::AGAIN) => self.filling += 1,
                lent => {
                    let lent = lent?;
                    self.put(lent);
                    return Ok(lent);
                }
            }
        }
    }

    /// Number of parked bytes.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Number of missing bytes.
    pub fn missing(&self) -> usize {
        self.room.as_ref().map_or(0, Reservation::len).saturating_sub(self.held)
    }

    /// The first pipe with bytes.
    fn first(&self) -> io::Result<&FilledPipe> {
        self.pipes.front().ok_or(io::ErrorKind::UnexpectedEof.into())
    }

    /// Bytes have come into the pipe that is filled.
    fn put(&mut self, moved: usize) {
        self.held += moved;
        if let Some(next) = self.pipes.get_mut(self.filling) {
            next.bytes += moved;
        }
    }

    /// Bytes have left the first pipe. It leaves when it is empty.
    fn took(&mut self, moved: usize) {
        self.held -= moved;
        if let Some(first) = self.pipes.front_mut() {
            first.bytes -= moved;
            if first.bytes == 0 {
                let empty = self.pipes.pop_front();
                self.filling = self.filling.saturating_sub(1);
                give_back(empty);
            }
        }
    }

    /// Parks the contents of `file` at offset `at`; waits for the disk if necessary. Fewer bytes
    /// than are missing mean the end of the file, or full pipes.
    ///
    /// # Errors
    /// Those of splice(2).
    pub fn fill_from_file(&mut self, file: impl AsFd, at: u64) -> io::Result<usize> {
        let mut filled = 0;
        self.from_file = true;
        while self.missing() > 0 {
            let mut offset = at + filled as u64;
            let len = self.missing();
            let flags = SpliceFlags::NONBLOCK;
            let Some(next) = self.pipes.get(self.filling) else { break };
            match splice(&file, Some(&mut offset), &next.pipe.write, None, len, flags) {
                Ok(0) => break,
                Ok(moved) => {
                    self.put(moved);
                    filled += moved;
                }
                // The file has no data yet.
                Err(Errno::AGAIN) if next.bytes == 0 => break,
                // Full.
                Err(Errno::AGAIN) => self.filling += 1,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // Pages of a file fill whole slots, so that it takes fewer pipes.
        if self.missing() == 0 {
            give_back(self.pipes.drain((self.filling + 1).min(self.pipes.len())..));
        }
        Ok(filled)
    }

    /// Parks all of the bytes, which were already received: pipes that take `room.len()` bytes by
    /// reference also take them as a copy.
    pub(crate) fn fill_from_bytes(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let next = self.pipes.get(self.filling).ok_or(io::ErrorKind::WouldBlock)?;
            match rustix::io::write(&next.pipe.write, bytes) {
                Ok(written) => {
                    self.put(written);
                    bytes = &bytes[written..];
                }
                Err(Errno::AGAIN) => self.filling += 1,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Parks what the socket has; `WouldBlock`: no data, or the pipe is full. 0: end of stream.
    pub(crate) fn fill_from_stream(&mut self, stream: impl AsFd) -> io::Result<usize> {
        let bytes = self.pipes.get(self.filling).map_or(0, |next| next.bytes);
        let mut share = SHARE.saturating_sub(bytes);
        if share == 0 {
            share = if self.next_pipe() { SHARE } else { usize::MAX };
        }
        let next = self.pipes.get(self.filling).ok_or(io::ErrorKind::WouldBlock)?;
        let len = self.missing().min(share);
        #[cfg(feature = "simulation")]
        let len = crate::simulation::splicing(stream.as_fd(), len)?;
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let moved = splice(stream, None, &next.pipe.write, None, len, flags)?;
        self.put(moved);
        Ok(moved)
    }

    /// Goes on with the next pipe, if there is one and this one has bytes. An empty pipe is not full,
    /// and bytes behind it would not be found: they are taken from the first pipe.
    pub(crate) fn next_pipe(&mut self) -> bool {
        let empty = self.pipes.get(self.filling).is_none_or(|next| next.bytes == 0);
        let more = !empty && self.filling + 1 < self.pipes.len();
        self.filling += usize::from(more);
        more
    }

    /// Sends what the socket takes; `WouldBlock` if it takes nothing now.
    pub(crate) fn drain_to_stream(&mut self, stream: impl AsFd) -> io::Result<usize> {
        let first = self.first()?;
        let len = first.bytes;
        #[cfg(feature = "simulation")]
        let len = crate::simulation::splicing(stream.as_fd(), len)?;
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let moved = splice(&first.pipe.read, None, stream, None, len, flags)?;
        self.took(moved);
        self.count(
            moved,
            if self.from_file { PayloadRoute::FileToSocket } else { PayloadRoute::SocketToSocket },
        );
        Ok(moved)
    }

    /// Writes everything that is parked to `file` at offset `at`; waits if necessary.
    ///
    /// # Errors
    /// Those of splice(2). A part may be written.
    pub fn drain_to_file(&mut self, file: impl AsFd, at: u64) -> io::Result<()> {
        let mut offset = at;
        while self.held > 0 {
            let flags = SpliceFlags::MOVE;
            let first = self.first()?;
            let len = first.bytes;
            match splice(&first.pipe.read, None, &file, Some(&mut offset), len, flags) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(moved) => {
                    self.took(moved);
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
    ///
    /// # Errors
    /// Those of reading from a pipe.
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
            match rustix::io::read(&self.first()?.pipe.read, &mut bytes[copied..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    copied += read;
                    self.took(read);
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
        // It takes one pipe.
        let empty = if self.pipes.len() == 1 { ParkedPayload::empty(0) } else { None };
        let Some(mut whole) = empty else { return Ok(Some(self.into_buf()?.0)) };
        let len = self.held;
        whole.fill_from_bytes(head)?;
        let flags = SpliceFlags::NONBLOCK;
        while self.held > 0 {
            let rest = self.held;
            let into = whole.first()?;
            match splice(&self.first()?.pipe.read, None, &into.pipe.write, None, rest, flags) {
                Ok(0) | Err(Errno::AGAIN) => break,
                Ok(moved) => {
                    whole.put(moved);
                    self.took(moved);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut refused = None;
        while self.held == 0 && refused.is_none() {
            let rest = whole.held;
            match splice(&whole.first()?.pipe.read, None, &device, None, rest, flags) {
                Ok(written) => {
                    whole.took(written);
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
}

impl FilledPipe {
    /// Empties the pipe and discards the bytes.
    fn discard(&mut self) {
        let Some(sink) = sink() else { return };
        while self.bytes > 0 {
            let flags = SpliceFlags::NONBLOCK;
            match splice(&self.pipe.read, None, sink, None, self.bytes, flags) {
                Ok(moved) if moved > 0 => self.bytes -= moved,
                _ => return,
            }
        }
    }
}

impl std::fmt::Debug for ParkedPayload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ParkedPayload({} bytes)", self.held)
    }
}

/// Others may have these pipes.
fn give_back(pipes: impl IntoIterator<Item = FilledPipe>) {
    let mut all = None;
    for mut held in pipes {
        held.discard();
        let all = all.get_or_insert_with(|| PIPES.lock().expect("no panic under this lock"));
        // A pipe that could not be emptied is closed, as its bytes must not leak into another
        // payload.
        if held.bytes == 0 {
            all.idle.push(held.pipe);
        } else {
            all.made -= 1;
        }
    }
}

impl Drop for ParkedPayload {
    fn drop(&mut self) {
        give_back(self.pipes.drain(..));
    }
}
