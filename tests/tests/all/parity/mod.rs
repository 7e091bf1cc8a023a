//! blockhaul in the place of nbdkit, next to Debian's nbdkit with the very same command line, by random
//! requests: a plugin, up to three filters with random parameters, a client without libraries. What both
//! advertise, every answer and what is stored in the end have to be the same, but for what
//! `docs/coming-from-nbdkit.md` says.
//!
//! A few fixed seeds are run always, sixty in some two minutes with `BLOCKHAUL_LONG`; `BLOCKHAUL_SEED` runs
//! one.

mod lines;
mod talk;

use std::fs;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::Path;

use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{PeerProgram, PeerServer, ScratchDir, among_peers};
use blockhaul_tests::{program, text};

use lines::Line;

/// Requests on each connection.
const REQUESTS: usize = 120;

/// A disk with data, zeroes that take room, and holes; what is where follows from the seed.
fn image(path: &Path, size: u64, rng: &mut Rng) {
    let file = fs::File::create(path).unwrap();
    file.set_len(size).unwrap();
    for _ in 0..8 {
        let at = rng.below(size);
        let mut bytes = vec![0; rng.between(1, 100_000).min(size - at) as usize];
        if rng.chance(80) {
            rng.fill(&mut bytes);
        }
        file.write_all_at(&bytes, at).unwrap();
    }
    if size > 4 << 10 {
        file.write_all_at(&lines::TABLE, 446).unwrap();
    }
}

/// One command line for both, and what is different.
fn compare(seed: u64) -> Result<(), String> {
    let rng = &mut Rng::new(seed);
    let line = Line::random(rng);
    let scratch = ScratchDir::on_disk().unwrap();
    let link = scratch.file("nbdkit");
    symlink(program(), &link).unwrap();
    let start = |name: &str, program: &Path| {
        let disk = scratch.file(&format!("{name}.img"));
        image(&disk, line.size, &mut Rng::new(seed));
        let socket = scratch.socket(name);
        let mut command = among_peers(program).unwrap();
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket);
        command.args(line.words(text(&disk)));
        (disk, PeerServer::start(command, &socket))
    };
    let (our_disk, ours) = start("ours", &link);
    let (their_disk, theirs) = start("theirs", Path::new("nbdkit"));
    let what = format!("seed {seed}: nbdkit {}", line.words("DISK").join(" "));
    let (ours, theirs) = match (ours, theirs) {
        (Ok(ours), Ok(theirs)) => (ours, theirs),
        (Err(_), Err(_)) => return Ok(()),
        // What cannot be opened is found when the server starts; there, when a client comes.
        (Err(_), Ok(theirs)) if talk::refuses(&theirs) => return Ok(()),
        (Err(why), _) => return Err(format!("{what}: does not start here: {why}")),
        (_, Err(why)) => return Err(format!("{what}: does not start there: {why}")),
    };
    let told =
        |why| format!("{what}: {why}\nsaid here: {}\nsaid there: {}", ours.said(), theirs.said());
    let mut asked = Vec::new();
    for _ in 0..2 {
        match talk::compare(&ours, &theirs, &line, rng, REQUESTS, &mut asked) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            // nbdkit ends with a failed assertion: `truncate` if it is asked for extents behind the end of the
            // disk below, `multi-conn` if a connection ends before it is ready.
            Err(_) if theirs.said().contains("Assertion `") => return Ok(()),
            Err(why) => return Err(told(why)),
        }
    }
    let ends = |server: PeerServer| server.stop().map(|status| status.code());
    let ours = ends(ours);
    let theirs = ends(theirs);
    if ours != theirs {
        return Err(format!("{what}: ends with {ours:?} here, {theirs:?} there"));
    }
    if fs::read(our_disk).unwrap() != fs::read(their_disk).unwrap() {
        return Err(format!("{what}: what is stored is different"));
    }
    Ok(())
}

#[test]
fn the_same_command_line_and_requests_give_the_same_answers() {
    if PeerProgram::require("nbdkit").is_none() {
        return;
    }
    let long = std::env::var_os("BLOCKHAUL_LONG").is_some();
    let seeds = match std::env::var_os("BLOCKHAUL_SEED") {
        Some(_) => vec![blockhaul_testkit::rng::seed()],
        None if long => {
            let mut rng = Rng::new(blockhaul_testkit::rng::seed());
            (0..60).map(|_| rng.number() >> 32).collect()
        }
        // The last: what a filter keeps outlives connections.
        None => (1..=12).chain([1_452_587_507]).collect(),
    };
    let wrong: Vec<_> = seeds.into_iter().filter_map(|seed| compare(seed).err()).collect();
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}
