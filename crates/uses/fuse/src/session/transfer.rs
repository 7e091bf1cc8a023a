//! Requests of the kernel that become requests of the device.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockhaul_block::{
    Can, Error, Kind, OpKind, Outcome, PendingRequest, Reply, Request, RequestFlags,
};
use blockhaul_io::{Data, ParkedPayload, Reservation};

use super::TRANSFER_MAX;
use super::disk::{DiskCall, Handles, Write};
use super::lane::Lane;
use crate::channel::ChannelBuffer;
use crate::protocol::{self, KernelErrno, O_DSYNC, SeekTarget, allocate_flags};
use crate::seek;

/// From this length on, data of a write goes to the device in the memory that it was received in,
/// which a new one then replaces; shorter data is copied, if there is memory.
const LARGE: usize = 64 << 10;

/// What the kernel waits for.
#[derive(Clone, Copy)]
enum ExpectedReply {
    /// So many bytes.
    Bytes(usize),
    /// The acknowledgement of so many bytes.
    Written { len: u32, cached: bool },
    /// That it is done.
    Done,
}

impl Lane {
    pub(super) async fn read(self: &Rc<Self>, call: DiskCall, at: u64, len: u32) {
        if len > TRANSFER_MAX {
            return self.channel.fail(call.unique, KernelErrno::INVAL);
        }
        // With a smaller length, a read at the end is no sign of another size.
        self.session.size_for(call.disk, at.saturating_add(1)).await;
        let rest = self.session.disks[call.disk].facts().size.saturating_sub(at);
        let len = usize::try_from(rest.min(len.into())).unwrap_or(usize::MAX);
        if len == 0 {
            return self.channel.reply(call.unique, &[]);
        }
        match self.session.pool.try_reserve(len) {
            Some(room) => self.read_into(call, at, room),
            None => self.read_later(call, at, len),
        }
    }

    fn read_into(self: &Rc<Self>, call: DiskCall, at: u64, room: Reservation) {
        let len = room.len();
        // The reply is sent unchanged, as a whole: the device may leave it in the kernel.
        let room = if ParkedPayload::fits_one_pipe(len) { room.parkable() } else { room };
        self.submit(call, ExpectedReply::Bytes(len), Request::read(at, room));
    }

    /// Reads when there is memory. The lane goes on meanwhile: if the device does not answer, the requests
    /// that have the memory must still be interrupted.
    fn read_later(self: &Rc<Self>, call: DiskCall, at: u64, len: usize) {
        self.answer_in_task(
            call.unique,
            async move |lane| lane.session.pool.reserve(len).await,
            move |lane, room| match room {
                Ok(room) => lane.read_into(call, at, room),
                Err(_) => lane.channel.fail(call.unique, KernelErrno::NOMEM),
            },
        );
    }

    /// Writes what is in `inbox`, up to the end of the disk.
    pub(super) async fn write(
        self: &Rc<Self>,
        call: DiskCall,
        Write { at, len, flags, cached }: Write,
        inbox: &mut ChannelBuffer,
    ) {
        self.session.size_for(call.disk, at.saturating_add(len.into())).await;
        let facts = self.session.disks[call.disk].facts();
        let rest = facts.size.saturating_sub(at);
        // At most the length that was asked for.
        let len = u32::try_from(rest.min(len.into())).unwrap_or(u32::MAX);
        let refuse = |kind, why, errno| {
            if cached {
                self.session.disks[call.disk].lose(Error::new(kind, why).on(&facts.name));
            }
            self.channel.fail(call.unique, errno);
        };
        if len == 0 {
            return refuse(Kind::NoSpace, "a write beyond its end", KernelErrno::NOSPC);
        }
        let Some(data) = self.payload(len as usize, inbox) else {
            return refuse(Kind::NoMemory, "no memory for a write", KernelErrno::NOMEM);
        };
        self.session.disks[call.disk].unflushed.store(true, Ordering::SeqCst);
        let durable = flags & O_DSYNC != 0 && facts.can.contains(Can::FUA);
        let flags = if durable { RequestFlags::FUA } else { RequestFlags::empty() };
        let request = Request::write(at, data).with(flags);
        self.submit(call, ExpectedReply::Written { len, cached }, request);
    }

    /// The data of a write.
    fn payload(&self, len: usize, inbox: &mut ChannelBuffer) -> Option<Data> {
        let copy = if len < LARGE { self.session.pool.try_reserve(len) } else { None };
        if let Some(room) = copy {
            let mut buf = room.into_buf();
            buf.copy_from_slice(inbox.data().get(..len)?);
            return Some(Data::from(buf));
        }
        let mut buf = inbox.take()?;
        buf.truncate(len);
        Some(Data::from(buf))
    }

    pub(super) fn flush(self: &Rc<Self>, call: DiskCall) {
        if !self.session.disks[call.disk].has_flush() {
            return self.channel.done(call.unique, Ok(()));
        }
        self.session.disks[call.disk].unflushed.store(false, Ordering::SeqCst);
        self.submit(call, ExpectedReply::Done, Request::flush());
    }

    /// Frees or zeroes a range. Space cannot be reserved, and the size stays.
    pub(super) async fn allocate(self: &Rc<Self>, call: DiskCall, at: u64, len: u64, mode: u32) {
        use allocate_flags::{KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE};
        self.session.size_for(call.disk, at.saturating_add(len)).await;
        let facts = self.session.disks[call.disk].facts();
        if !facts.can.contains(Can::ZERO) {
            let errno = if facts.can.contains(Can::WRITE) {
                KernelErrno::OPNOTSUPP
            } else {
                KernelErrno::ROFS
            };
            return self.channel.fail(call.unique, errno);
        }
        let Some(end) = at.checked_add(len).filter(|_| len > 0) else {
            return self.channel.fail(call.unique, KernelErrno::INVAL);
        };
        let flags = match mode {
            mode if mode == PUNCH_HOLE | KEEP_SIZE => RequestFlags::empty(),
            mode if mode == ZERO_RANGE | KEEP_SIZE => RequestFlags::NO_HOLE,
            ZERO_RANGE if end <= facts.size => RequestFlags::NO_HOLE,
            _ => return self.channel.fail(call.unique, KernelErrno::OPNOTSUPP),
        };
        let inside = end.min(facts.size).saturating_sub(at);
        if inside == 0 {
            return self.channel.done(call.unique, Ok(()));
        }
        self.session.disks[call.disk].unflushed.store(true, Ordering::SeqCst);
        self.submit(call, ExpectedReply::Done, Request::zero(at, inside).with(flags));
    }

    /// Searches for data or a hole, in a task of its own.
    pub(super) fn seek(self: &Rc<Self>, call: DiskCall, at: u64, whence: Option<SeekTarget>) {
        let Some(whence) = whence else {
            return self.channel.fail(call.unique, KernelErrno::INVAL);
        };
        self.answer_in_task(
            call.unique,
            async move |lane| {
                lane.session.size_for(call.disk, at.saturating_add(1)).await;
                let handles = lane.session.disks[call.disk].handles();
                let device = handles.of(lane.number);
                if at < device.facts().size {
                    seek::seek(&**device, at, whence).await
                } else {
                    Ok(None)
                }
            },
            move |lane, found| match found {
                Ok(Some(found)) => lane.channel.reply(call.unique, &protocol::position(found)),
                Ok(None) => lane.channel.fail(call.unique, KernelErrno::NXIO),
                Err(error) => lane.channel.fail(call.unique, lane.session.errno(&error)),
            },
        );
    }

    /// Submits a request to the device, and answers when it completes.
    fn submit(self: &Rc<Self>, call: DiskCall, expected: ExpectedReply, request: Request) {
        let kind = request.kind();
        let durable = kind == OpKind::Flush || request.flags.contains(RequestFlags::FUA);
        let handles = self.session.disks[call.disk].handles();
        let device = handles.of(self.number);
        let submitted = if durable {
            self.session.disks[call.disk].submit_durable(device, request)
        } else {
            device.submit(request).now()
        };
        match submitted {
            Ok(outcome) => self.complete(call, expected, outcome),
            Err(pending) => self.complete_later(call, expected, kind, (pending, handles)),
        }
    }

    fn complete_later(
        self: &Rc<Self>,
        call: DiskCall,
        expected: ExpectedReply,
        kind: OpKind,
        (pending, handles): (PendingRequest, Arc<Handles>),
    ) {
        let completed = async move |_: &Rc<Lane>| {
            let outcome = pending.await;
            drop(handles);
            outcome
        };
        let complete = move |lane: &Rc<Lane>, outcome| lane.complete(call, expected, outcome);
        // A write that was answered early could overwrite what its caller writes next.
        if kind.changes() {
            self.in_task(async move |lane| complete(lane, completed(lane).await));
        } else {
            self.answer_in_task(call.unique, completed, complete);
        }
    }

    fn complete(&self, call: DiskCall, expected: ExpectedReply, outcome: Outcome) {
        let Lane { session, channel, .. } = self;
        let reply = match outcome {
            Ok(reply) => reply,
            Err(error) => {
                // A flush that failed, or was refused, has to be reported at the end, too.
                let unflushed = &session.disks[call.disk].unflushed;
                unflushed.fetch_or(matches!(expected, ExpectedReply::Done), Ordering::SeqCst);
                if matches!(expected, ExpectedReply::Written { cached: true, .. }) {
                    session.disks[call.disk].lose(error.clone());
                }
                return channel.fail(call.unique, session.errno(&error));
            }
        };
        match (reply, expected) {
            (Reply::Data(data), ExpectedReply::Bytes(len)) if data.len() == len => {
                channel.data(call.unique, data);
            }
            (Reply::Hole, ExpectedReply::Bytes(len)) => channel.zeroes(call.unique, len),
            (Reply::Done, ExpectedReply::Written { len, .. }) => {
                channel.reply(call.unique, &protocol::written(len));
            }
            (Reply::Done, ExpectedReply::Done) => channel.done(call.unique, Ok(())),
            _ => channel.fail(call.unique, session.errno(&blockhaul_block::Error::misfit())),
        }
    }
}
