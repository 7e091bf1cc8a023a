//! Servers that are slow in their own ways: connections whose handshake never ends, and servers that
//! are slower the more connections there are. These take their time: `BLOCKHAUL_LONG` runs them.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use blockhaul_testkit::model::Model;
use blockhaul_testkit::peer::{self, Conversation, HandshakeFault, Offer, ScriptedServer};
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{self, ScratchDir};
use blockhaul_tests::{LIMIT, assert_same, blockhaul, bounded, lossy, text};
use blockhaul_wire::request::RequestHeader;
use blockhaul_wire::{CommandCode, magic};

fn image(scratch: &ScratchDir, size: usize) -> PathBuf {
    let mut bytes = vec![0; size];
    Rng::new(seed()).fill(&mut bytes);
    let path = scratch.file("image");
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_handshake_that_never_ends_is_given_up_after_ten_seconds() {
    if !tools::runs_long() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let size = 26 << 20;
    let image = image(&scratch, size);
    let content = fs::read(&image).unwrap();
    for fault in [HandshakeFault::Silent, HandshakeFault::StopAtOption(2)] {
        let first = Offer::new(Model::new(size as u64).with_content(content.clone()));
        let mut second = Offer::new(Model::new(size as u64)).handshake(fault.clone());
        second.model = first.model.clone();
        let from = ScriptedServer::start(move |talk, number| {
            let _ = peer::serve(talk, number, if number == 0 { &first } else { &second });
            Ok(())
        });
        let target = scratch.file("target");
        // 13 seconds, and segments enough for all connections.
        let slow = ["--rate=2M", "--segment=1M", "--request-size=128k"];
        let ends = ["-v", &from.uri(), text(&target)];
        let output = bounded(&mut blockhaul(&[&["copy"], &slow[..], &ends].concat()), LIMIT);
        let said = lossy(&output.stderr);
        assert!(output.status.success(), "{fault:?}: {said}");
        assert!(from.connections() > 1, "{fault:?}: no second connection was tried");
        let warnings: Vec<_> = said.lines().filter(|line| line.contains("warning: ")).collect();
        assert_eq!(warnings.len(), 1, "{fault:?}: {said}");
        assert!(warnings[0].contains("no handshake within 10 s"), "{fault:?}: {said}");
        assert!(said.contains(" 1 connection,"), "{fault:?}: {said}");
        assert_same(&image, &target, &format!("{fault:?}"));
    }
}

/// Longer than the copy takes that finds out about it.
const COPY: Duration = Duration::from_secs(1200);

/// A disk that is served one request at a time, each the more slowly the more connections have asked for the
/// last eight.
struct Crowded {
    content: Vec<u8>,
    /// Requests that have come; each is served in its turn, however the threads run.
    came: AtomicU64,
    turn: Condvar,
    /// How many have been served, and the connections of the last; locked while one is.
    served: Mutex<(u64, VecDeque<usize>)>,
}

impl Crowded {
    /// One connection: the least of a handshake, and simple replies.
    fn serve(&self, talk: &mut Conversation, number: usize) -> Result<(), String> {
        // NBD_FLAG_HAS_FLAGS, …_READ_ONLY, …_CAN_MULTI_CONN.
        const FLAGS: u16 = 1 | 1 << 1 | 1 << 8;
        // Longer than the copy may do without this connection.
        talk.patience(COPY)?;
        talk.greet(3)?;
        loop {
            let (code, _) = talk.receive_option()?;
            if code == magic::OPT_GO {
                break;
            }
            talk.reply_option(code, magic::REP_ERR_UNSUP, &[])?;
        }
        let size = (self.content.len() as u64).to_be_bytes();
        let export = [&magic::INFO_EXPORT.to_be_bytes()[..], &size, &FLAGS.to_be_bytes()].concat();
        talk.reply_option(magic::OPT_GO, magic::REP_INFO, &export)?;
        talk.reply_option(magic::OPT_GO, magic::REP_ACK, &[])?;
        while let Some((request, _)) = talk.receive_request()? {
            match request.command {
                CommandCode::Read => talk.send(&self.read(talk, &request, number))?,
                CommandCode::Disconnect => break,
                // EINVAL.
                _ => talk.send(&talk.done(&request, 22))?,
            }
        }
        Ok(())
    }

    fn read(&self, talk: &Conversation, request: &RequestHeader, number: usize) -> Vec<u8> {
        let place = self.came.fetch_add(1, Ordering::SeqCst);
        let served = self.served.lock().unwrap();
        let mut served = self.turn.wait_while(served, |served| served.0 != place).unwrap();
        if served.1.len() == 8 {
            served.1.pop_front();
        }
        served.1.push_back(number);
        let different = served.1.iter().collect::<BTreeSet<_>>().len() as u64;
        std::thread::sleep(Duration::from_millis(2 * different * different));
        served.0 += 1;
        self.turn.notify_all();
        drop(served);
        let at = request.offset as usize;
        let len = request.length as usize;
        [&talk.simple(request.cookie, 0), &self.content[at..at + len]].concat()
    }
}

#[test]
fn a_server_that_is_slower_with_more_connections_is_used_with_fewer() {
    if !tools::runs_long() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let image = image(&scratch, 128 << 20);
    let target = scratch.file("target");
    let crowded = Crowded {
        content: fs::read(&image).unwrap(),
        came: AtomicU64::new(0),
        turn: Condvar::new(),
        served: Mutex::default(),
    };
    // What becomes of clients that leave is not the point.
    let from = ScriptedServer::start(move |talk, number| {
        let _ = crowded.serve(talk, number);
        Ok(())
    });
    let options = ["--request-size=256k", "--segment=1M", "--progress=json"];
    let ends = ["-v", &from.uri(), text(&target)];
    let mut copy = blockhaul(&[&["copy"], &options[..], &ends].concat());
    let output = bounded(&mut copy, COPY);
    let said = lossy(&output.stderr) + &lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert_same(&image, &target, "slower with more connections");
    let running = said.lines().filter(|line| line.contains("\"finished\":false"));
    let mut used = running.filter_map(|line| {
        let (_, rest) = line.split_once("\"connections\":")?;
        rest.split([',', '}']).next()?.parse::<u64>().ok()
    });
    let most = used.clone().max();
    let end = used.next_back();
    assert!(most >= Some(4) && end < Some(4), "from {most:?} to {end:?} connections: {said}");
}
