//! One worker's part of a session: it reads requests from its descriptor and answers them.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use blockhaul_io::Event;

use super::disk::{DRAIN, DiskCall, DiskFile, Write};
use super::{Session, TRANSFER_MAX};
use crate::channel::{Channel, ChannelBuffer, ChannelEvent};
use crate::files::Node;
use crate::protocol::{
    self, DirEntries, InHeader, KernelErrno, KernelRequest, MAJOR, O_ACCMODE, Operation,
};
use crate::protocol::{SetAttr, set_flags};

/// Requests processed before other tasks of the worker run; their bytes count as well, by
/// [`BYTES_PER_SHARE`].
const TURN: usize = 64;
/// Bytes that count as one request.
const BYTES_PER_SHARE: usize = 128 << 10;
/// Requests of a worker that the device has. The kernel has its own limits, and bytes limit reads
/// and writes; this limits the rest.
const REQUESTS_MAX: usize = 1024;

/// A lane rests when it has been woken often enough for requests of less than [`FEW`] together: each time
/// adds [`IN_VAIN`], and each time that it has found more takes one away.
const TIRED: u32 = 16;
const IN_VAIN: u32 = 2;
/// Bytes of requests, which the lane that is awake answers sooner: lanes that share them are woken twice as
/// often, and send their answers one by one.
const FEW: usize = 32 << 10;
/// A lane that has found requests of so many bytes without a pause cannot keep up: it calls one that rests.
const MANY: usize = 1 << 20;
/// Bytes of a request at least, in these measures.
const REQUEST_MIN: usize = 4096;

/// A question about a file, whose answer depends on its size.
struct SizeQuery {
    node: Node,
    kind: SizeQueryKind,
}

enum SizeQueryKind {
    Attr,
    Entry,
    Open { flags: u32 },
}

/// One worker's part of a session.
pub(super) struct Lane {
    pub(super) session: Arc<Session>,
    pub(super) channel: Arc<Channel>,
    /// Its number, from 0. The first one never leaves requests to the others.
    pub(super) number: usize,
    /// Requests that the device has.
    pub(super) running: Cell<usize>,
    /// Signals that one of them has completed.
    pub(super) completed: Event,
}

impl Lane {
    pub(super) fn new(session: Arc<Session>, channel: Arc<Channel>, number: usize) -> Rc<Lane> {
        Rc::new(Lane { session, channel, number, running: Cell::new(0), completed: Event::new() })
    }

    /// Answers requests until the file system is unmounted, then completes those in flight. Returns
    /// the number of those that the device holds for too long.
    pub(super) async fn run(self: Rc<Self>) -> (io::Result<()>, usize) {
        let result = self.receive().await;
        self.session.standby.call_all();
        let drained = blockhaul_io::timeout(DRAIN, self.until_fewer(1)).await;
        (result, if drained.is_ok() { 0 } else { self.running.get() })
    }

    /// Waits until the device has fewer than `count` requests.
    async fn until_fewer(&self, count: usize) {
        loop {
            let mark = self.completed.mark();
            if self.running.get() < count {
                return;
            }
            self.completed.wait_after(mark).await;
        }
    }

    async fn receive(self: &Rc<Self>) -> io::Result<()> {
        let mut inbox = ChannelBuffer::new();
        let mut turn = 0;
        // Bytes without a pause, and the number of them that makes it call another lane.
        let mut found = 0;
        let mut call_at = MANY;
        let mut tired = 0_u32;
        loop {
            self.make_room(&mut inbox).await?;
            self.until_fewer(REQUESTS_MAX).await;
            match self.channel.try_receive(&mut inbox) {
                Ok(ChannelEvent::Request(total)) => {
                    let bytes = self.handle(&mut inbox, total).await;
                    turn += 1 + bytes / BYTES_PER_SHARE;
                    found += bytes.max(REQUEST_MIN);
                    if found >= call_at {
                        call_at = found + MANY;
                        self.session.standby.call();
                    }
                }
                Ok(ChannelEvent::Unmounted) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let in_vain = found < FEW;
                    tired =
                        if in_vain { tired + IN_VAIN } else { tired.saturating_sub(1) }.min(TIRED);
                    (turn, found, call_at) = (0, 0, MANY);
                    if tired >= TIRED && self.number > 0 {
                        let called = self.session.standby.rest().await;
                        // Once more in vain, and it rests again.
                        tired = if called { 0 } else { TIRED - 1 };
                    }
                    self.channel.readable().await?;
                }
                Err(error) => return Err(error),
            }
            if turn >= TURN {
                turn = 0;
                blockhaul_io::yield_now().await;
            }
        }
    }

    /// Waits for memory for the data of a write, after the last one was given away.
    async fn make_room(&self, inbox: &mut ChannelBuffer) -> io::Result<()> {
        if !inbox.has_room() {
            let room = self.session.inboxes.reserve(TRANSFER_MAX as usize).await;
            inbox.provide(room.map_err(io::Error::other)?.into_buf());
        }
        Ok(())
    }

    /// Answers a request, now or when the device has completed it. Returns its bytes.
    async fn handle(self: &Rc<Self>, inbox: &mut ChannelBuffer, total: usize) -> usize {
        let request = match KernelRequest::parse(inbox.request(total), total) {
            Ok(request) => request,
            Err(malformed) => {
                log::warn!("the kernel sent a request that is {malformed}");
                if let Some(unique) = malformed.unique {
                    self.channel.fail(unique, KernelErrno::INVAL);
                }
                return 0;
            }
        };
        let InHeader { unique, node, .. } = request.header;
        let node = self.session.files.node(node, self.session.disks.len());
        match request.operation {
            Operation::Read { at, len } => {
                match node {
                    Some(Node::Disk(disk)) => self.read(DiskCall { unique, disk }, at, len).await,
                    Some(Node::Info) => self.read_text(unique, at, len),
                    _ => self.channel.fail(unique, KernelErrno::ISDIR),
                }
                len as usize
            }
            Operation::Write { at, len, flags, cached } => {
                match node {
                    Some(Node::Disk(disk)) => {
                        let write = Write { at, len, flags, cached };
                        self.write(DiskCall { unique, disk }, write, inbox).await;
                    }
                    _ => self.channel.fail(unique, KernelErrno::ACCES),
                }
                len as usize
            }
            operation => {
                match (operation, node) {
                    (Operation::Fsync, Some(Node::Disk(disk))) => {
                        self.flush(DiskCall { unique, disk })
                    }
                    (Operation::Allocate { at, len, mode }, Some(Node::Disk(disk))) => {
                        self.allocate(DiskCall { unique, disk }, at, len, mode).await;
                    }
                    (Operation::Seek { at, whence }, Some(Node::Disk(disk))) => {
                        self.seek(DiskCall { unique, disk }, at, whence);
                    }
                    (operation, node) => match self.about_size(node, &operation) {
                        Some(about) => self.answer_later(unique, about),
                        None => self.answer(unique, node, &operation),
                    },
                }
                0
            }
        }
    }

    /// What a request asks about a file whose size may have changed since the last look.
    fn about_size(&self, node: Option<Node>, operation: &Operation<'_>) -> Option<SizeQuery> {
        let Session { files, disks, .. } = &*self.session;
        let (node, kind) = match *operation {
            Operation::GetAttr => (node?, SizeQueryKind::Attr),
            Operation::Open { flags } => (node?, SizeQueryKind::Open { flags }),
            Operation::Lookup(name) if node == Some(Node::Folder) => {
                (files.named(name, disks)?, SizeQueryKind::Entry)
            }
            _ => return None,
        };
        let due = match node {
            Node::Disk(disk) => disks[disk].is_due(),
            Node::Info => disks.iter().any(DiskFile::is_due),
            Node::Folder => false,
        };
        due.then_some(SizeQuery { node, kind })
    }

    /// Answers after a look at the size, which may take long: the lane goes on meanwhile.
    fn answer_later(self: &Rc<Self>, unique: u64, about: SizeQuery) {
        let SizeQuery { node, kind } = about;
        self.answer_in_task(
            unique,
            async move |lane| lane.session.look(node).await,
            move |lane, ()| match kind {
                SizeQueryKind::Attr => lane.body(unique, lane.attr(Some(node))),
                SizeQueryKind::Entry => lane.body(unique, Ok(lane.entry(node))),
                SizeQueryKind::Open { flags } => lane.body(unique, lane.open(Some(node), flags)),
            },
        );
    }

    /// Waits for `ready` in a task of its own, then answers the request `unique` with `answer`. The kernel may
    /// interrupt it meanwhile: it is answered with EINTR at once, and `answer` is not called.
    pub(super) fn answer_in_task<T: 'static>(
        self: &Rc<Self>,
        unique: u64,
        ready: impl AsyncFnOnce(&Rc<Lane>) -> T + 'static,
        answer: impl FnOnce(&Rc<Lane>, T) + 'static,
    ) {
        self.session.in_flight.add(unique, &self.channel);
        self.in_task(async move |lane| {
            let result = ready(lane).await;
            if lane.session.in_flight.take(unique) {
                answer(lane, result);
            }
        });
    }

    /// Starts a task that counts as a request of the device until it ends.
    pub(super) fn in_task(self: &Rc<Self>, work: impl AsyncFnOnce(&Rc<Lane>) + 'static) {
        let running = LaneRequest::begin(self);
        drop(blockhaul_io::start(async move { work(&running.0).await }));
    }

    /// Answers a request that needs no request to the device.
    fn answer(&self, unique: u64, node: Option<Node>, operation: &Operation<'_>) {
        let Lane { session, channel, .. } = self;
        match *operation {
            Operation::Init(ref init) if init.major > MAJOR => {
                // The kernel then asks again, in our version.
                channel.reply(unique, &protocol::init_version());
            }
            Operation::Init(ref init) => self.body(
                unique,
                session.init(init).map(|reply| {
                    log::debug!("FUSE {}.{}, flags {:#x}", init.major, init.minor, reply.flags);
                    protocol::init(&reply)
                }),
            ),
            // Nodes are known as long as the mount.
            Operation::Forget => {}
            Operation::Interrupt(number) => session.in_flight.interrupt(number),
            Operation::Lookup(name) => self.body(unique, self.look_up(node, name)),
            Operation::GetAttr => self.body(unique, self.attr(node)),
            Operation::SetAttr(ref set) => self.body(unique, self.set_attr(node, set)),
            Operation::Open { flags } => self.body(unique, self.open(node, flags)),
            Operation::OpenDir => channel.reply(unique, &protocol::opened(0)),
            Operation::ReadDir { at, len } => self.body(unique, self.read_dir(node, at, len)),
            Operation::Statfs => {
                let statfs = session.files.statfs(&session.disks);
                channel.reply(unique, &protocol::statfs(&statfs));
            }
            Operation::Release | Operation::ReleaseDir | Operation::Destroy | Operation::Fsync => {
                channel.done(unique, Ok(()));
            }
            Operation::Allocate { .. } | Operation::Seek { .. } => {
                channel.fail(unique, KernelErrno::OPNOTSUPP);
            }
            Operation::Read { .. } | Operation::Write { .. } | Operation::Other => {
                channel.fail(unique, KernelErrno::NOSYS);
            }
        }
    }

    fn body(&self, unique: u64, result: Result<impl AsRef<[u8]>, KernelErrno>) {
        match result {
            Ok(body) => self.channel.reply(unique, body.as_ref()),
            Err(errno) => self.channel.fail(unique, errno),
        }
    }

    fn look_up(&self, folder: Option<Node>, name: &[u8]) -> Result<Vec<u8>, KernelErrno> {
        let Session { files, disks, .. } = &*self.session;
        if folder != Some(Node::Folder) {
            return Err(KernelErrno::NOTDIR);
        }
        let found = files.named(name, disks).ok_or(KernelErrno::NOENT)?;
        Ok(self.entry(found))
    }

    fn entry(&self, node: Node) -> Vec<u8> {
        let Session { files, disks, .. } = &*self.session;
        protocol::entry(&files.attr(node, disks))
    }

    fn attr(&self, node: Option<Node>) -> Result<Vec<u8>, KernelErrno> {
        let Session { files, disks, .. } = &*self.session;
        let node = node.ok_or(KernelErrno::NOENT)?;
        Ok(protocol::attr(&files.attr(node, disks)))
    }

    /// Times are accepted and not kept. The kernel lets the owner of a disk alone change its permissions. A
    /// disk has its size: like a block device, it ignores
    /// O_TRUNC, and refuses another size that is asked for explicitly.
    fn set_attr(&self, node: Option<Node>, set: &SetAttr) -> Result<Vec<u8>, KernelErrno> {
        let Session { disks, .. } = &*self.session;
        let truncates = set.size == 0 && set.valid & set_flags::HANDLE == 0;
        if set.valid & set_flags::OWNERSHIP != 0 {
            return Err(KernelErrno::PERM);
        }
        if set.valid & set_flags::MODE != 0 {
            let Some(Node::Disk(disk)) = node else { return Err(KernelErrno::PERM) };
            let mode = set.mode & 0o7777;
            match (mode & !0o666, mode & 0o222) {
                (0, 0) => {}
                (0, _) if disks[disk].write => {}
                (0, _) => return Err(KernelErrno::ROFS),
                _ => return Err(KernelErrno::PERM),
            }
            disks[disk].mode.set(mode);
        }
        if set.valid & set_flags::SIZE != 0 {
            let Some(Node::Disk(disk)) = node else { return Err(KernelErrno::ACCES) };
            if !disks[disk].write {
                return Err(KernelErrno::ROFS);
            }
            if !truncates && set.size != disks[disk].facts().size {
                return Err(KernelErrno::PERM);
            }
        }
        self.attr(node)
    }

    fn open(&self, node: Option<Node>, flags: u32) -> Result<[u8; 16], KernelErrno> {
        let writes = flags & O_ACCMODE != 0;
        match node {
            Some(Node::Disk(disk)) if writes && !self.session.disks[disk].write => {
                Err(KernelErrno::ROFS)
            }
            Some(Node::Disk(_)) => Ok(protocol::opened(self.session.open_flags())),
            Some(Node::Info) if writes => Err(KernelErrno::ACCES),
            // It changes when a size does.
            Some(Node::Info) => Ok(protocol::opened(protocol::open_flags::DIRECT_IO)),
            Some(Node::Folder) => Err(KernelErrno::ISDIR),
            None => Err(KernelErrno::NOENT),
        }
    }

    fn read_dir(&self, node: Option<Node>, at: u64, len: u32) -> Result<Vec<u8>, KernelErrno> {
        if node != Some(Node::Folder) {
            return Err(KernelErrno::NOTDIR);
        }
        let mut entries = DirEntries::new(len.min(TRANSFER_MAX));
        let all = (1_u64..).zip(self.session.files.entries(&self.session.disks));
        for (next, (node, kind, name)) in all.filter(|(next, _)| *next > at) {
            if !entries.add(node, next, kind, name) {
                break;
            }
        }
        Ok(entries.into_bytes())
    }

    fn read_text(&self, unique: u64, at: u64, len: u32) {
        let text = self.session.files.text(&self.session.disks);
        let start = usize::try_from(at).unwrap_or(usize::MAX).min(text.len());
        let end = start.saturating_add(len as usize).min(text.len());
        self.channel.reply(unique, &text.as_bytes()[start..end]);
    }
}

/// A request that the device has; not any more when this is dropped.
struct LaneRequest(Rc<Lane>);

impl LaneRequest {
    fn begin(lane: &Rc<Lane>) -> LaneRequest {
        lane.running.update(|count| count + 1);
        LaneRequest(lane.clone())
    }
}

impl Drop for LaneRequest {
    fn drop(&mut self) {
        self.0.running.update(|count| count - 1);
        self.0.completed.notify();
    }
}
