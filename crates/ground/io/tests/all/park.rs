//! Payloads that stay in the kernel: file to socket to socket to file, and every way to read them.

use std::io::Write;
use std::os::unix::net::UnixStream;

use blockhaul_io::{
    Buf, Data, File, IoEngine, ParkedPayload, Pool, RecvWindow, Reservation, Runtime,
    RuntimeConfig, SendQueue, Stream,
};

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

fn file_of(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    File::new(file.into())
}

fn park(file: &File, at: u64, len: usize) -> ParkedPayload {
    let mut parked =
        ParkedPayload::begin(Reservation::unpooled(len).parkable()).expect("a pipe is free");
    assert_eq!(parked.fill_from_file(file, at).unwrap(), len);
    assert_eq!(parked.missing(), 0);
    parked
}

fn on_every_engine<F: Future<Output = ()> + 'static>(
    check: impl Fn() -> F + Send + Copy + 'static,
) {
    for engine in [IoEngine::Auto, IoEngine::Threads] {
        Runtime::start(&RuntimeConfig { workers: 1, engine }).unwrap().block_on(check);
    }
}

#[test]
fn small_large_and_unwilling_rooms_are_not_parked() {
    for (len, park) in [(4096, true), (5 << 20, true), (256 << 10, false)] {
        let room =
            if park { Reservation::unpooled(len).parkable() } else { Reservation::unpooled(len) };
        assert!(ParkedPayload::begin(room).is_err(), "{len}");
    }
}

#[test]
fn looking_copies_once_and_room_comes_back() {
    let bytes = pattern(300_000);
    let file = file_of(&bytes);
    let pool = Pool::new(1 << 20);
    let room = pool.try_reserve(200_000).unwrap().parkable();
    let mut parked = ParkedPayload::begin(room).unwrap();
    parked.fill_from_file(&file, 1000).unwrap();
    let data = Data::from(parked);
    assert!(data.is_parked());
    assert_eq!(data.len(), 200_000);
    assert!(data.slice(5, 100_000).bytes() == &bytes[1005..101_005]);
    assert!(!data.is_parked());
    assert!(data.bytes() == &bytes[1000..201_000]);
    assert!(data.clone().take_parked().is_err());
    drop(data);
    assert_eq!(pool.reserved(), 0);
    // Never read, never sent: dropped with its pipe emptied.
    drop(Data::from(park(&file, 0, 100_000)));
}

#[test]
fn long_payloads_take_several_pipes_and_give_them_back() {
    let bytes = pattern(5 << 20);
    let file = file_of(&bytes);
    // More than there are pipes, one after the other; odd offsets take a slot more.
    for (number, len) in
        [4 << 20, 1 << 20, (1 << 20) + 1, 3_000_001, 600_000].repeat(20).iter().enumerate()
    {
        let at = number * 1237;
        let data = Data::from(park(&file, at as u64, *len));
        assert!(data.bytes() == &bytes[at..at + len], "{len} from {at}");
    }
    let target = File::new(tempfile::tempfile().unwrap().into());
    let mut parked = park(&file, 77, 4_000_000);
    parked.drain_to_file(&target, 5).unwrap();
    assert_eq!(parked.held(), 0);
    let mut written = vec![0; 4_000_000];
    assert_eq!(target.read_now(&mut written, 5).unwrap(), written.len());
    assert!(written == bytes[77..4_000_077]);
    // It is no whole for a FUSE device.
    let folder = tempfile::tempdir().unwrap();
    let device = std::fs::File::create(folder.path().join("device")).unwrap();
    let copy = park(&file, 9, 3 << 20).drain_whole(b"head", &device).unwrap();
    assert!(*copy.expect("it has several pipes") == bytes[9..9 + (3 << 20)]);
}

#[test]
fn a_file_that_ends_parks_less() {
    let file = file_of(&pattern(100_000));
    let mut parked = ParkedPayload::begin(Reservation::unpooled(100_000).parkable()).unwrap();
    assert_eq!(parked.fill_from_file(&file, 50_000).unwrap(), 50_000);
    assert_eq!(parked.missing(), 50_000);
    let (buf, copied) = parked.into_buf().unwrap();
    assert_eq!((buf.len(), copied), (100_000, 50_000));
    assert!(buf[..copied] == pattern(100_000)[50_000..]);
}

#[test]
fn a_head_and_a_payload_are_written_as_a_whole_or_come_back() {
    let bytes = pattern(300_000);
    let file = file_of(&bytes);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("target");
    let target = std::fs::File::create(&path).unwrap();
    for at in [0, 10_000] {
        assert!(park(&file, at, 200_000).drain_whole(b"head", &target).unwrap().is_none());
    }
    let written = std::fs::read(&path).unwrap();
    assert_eq!(written.len(), 400_008);
    assert!(written[..4] == *b"head" && written[4..200_004] == bytes[..200_000]);
    assert!(written[200_004..200_008] == *b"head");
    assert!(written[200_008..] == bytes[10_000..210_000]);

    // splice(2) writes to no file that is opened for appending.
    let appending = std::fs::File::options().append(true).open(&path).unwrap();
    let copy = park(&file, 3, 200_000).drain_whole(b"head", &appending).unwrap();
    assert!(*copy.expect("it is refused") == bytes[3..200_003]);

    // A pipe that nobody reads from takes the bytes, and says that it does not.
    let (read, write) = rustix::pipe::pipe().unwrap();
    drop(read);
    let refused = park(&file, 0, 200_000).drain_whole(b"head", &write);
    match refused {
        Ok(copy) => assert!(*copy.expect("nobody reads") == bytes[..200_000]),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe),
    }
}

#[test]
fn payloads_travel_from_file_to_file_through_two_sockets() {
    on_every_engine(|| async {
        let bytes = pattern(12 << 20);
        let source = file_of(&bytes);
        let target = tempfile::tempfile().unwrap();
        target.set_len(bytes.len() as u64).unwrap();
        let copy = File::new(target.into());
        let (a, b) = UnixStream::pair().unwrap();
        let a = Stream::new(a.into()).unwrap();
        let b = Stream::new(b.into()).unwrap();
        // Odd lengths, at the limits of parking, and of pages.
        let lens = [
            256 << 10,
            65536,
            65535,
            100_001,
            512 << 10,
            4096,
            4 << 20,
            1,
            300_000,
            1_700_001,
            128 << 10,
        ];
        let total: usize = lens.iter().sum();
        let sender = blockhaul_io::spawn(async move {
            let mut queue = SendQueue::default();
            let mut at = 0;
            for len in lens {
                queue.head(b"12345678901234567890123456789012");
                let room = Reservation::unpooled(len).parkable();
                queue.data(match ParkedPayload::begin(room) {
                    Ok(mut parked) => {
                        parked.fill_from_file(&source, at as u64).unwrap();
                        parked.into()
                    }
                    Err(_) => Data::copy_of(&pattern(12 << 20)[at..at + len]),
                });
                at += len;
                while !queue.send(&a).unwrap() {
                    a.writable().await.unwrap();
                }
                assert_eq!(queue.queued(), 0);
            }
        });
        let mut window = RecvWindow::new();
        let mut at = 0_u64;
        let mut in_kernel = 0;
        for len in lens {
            while window.bytes().len() < 32 {
                assert!(window.fill(&b).await.unwrap());
            }
            assert_eq!(&window.bytes()[..4], b"1234", "at {at}");
            window.consume(32);
            let room = Reservation::unpooled(len).parkable();
            let data = window.payload_or_parked(&b, room).await.unwrap().unwrap();
            assert_eq!(data.len(), len);
            match data.take_parked() {
                Ok(mut parked) => {
                    in_kernel += 1;
                    parked.drain_to_file(&copy, at).unwrap();
                    assert_eq!(parked.held(), 0);
                }
                Err(data) => copy.write_all_at(data, at).await.unwrap(),
            }
            at += len as u64;
        }
        sender.await;
        assert!(in_kernel >= 6, "{in_kernel} payloads stayed in the kernel");
        let (result, copied) = copy.read_exact_at(Buf::unpooled(total), 0).await;
        result.unwrap();
        assert!(copied[..] == bytes[..total]);
    });
}

#[test]
fn a_stream_that_ends_in_a_payload_is_noticed() {
    on_every_engine(|| async {
        let (mut a, b) = UnixStream::pair().unwrap();
        let b = Stream::new(b.into()).unwrap();
        a.write_all(&pattern(100_000)).unwrap();
        drop(a);
        let mut window = RecvWindow::new();
        let room = Reservation::unpooled(200_000).parkable();
        assert!(window.payload_or_parked(&b, room).await.unwrap().is_none());
    });
}

#[test]
fn a_payload_in_tiny_pieces_arrives_although_its_pipe_has_too_few_slots() {
    on_every_engine(|| async {
        let (a, b) = UnixStream::pair().unwrap();
        let b = Stream::new(b.into()).unwrap();
        let bytes = pattern(200_000);
        let sent = bytes.clone();
        let writer = std::thread::spawn(move || {
            let mut a = a;
            // Each piece fills its own slot.
            sent.chunks(97).for_each(|piece| a.write_all(piece).unwrap());
        });
        let mut window = RecvWindow::new();
        let room = Reservation::unpooled(bytes.len()).parkable();
        let work = window.payload_or_parked(&b, room);
        let data = blockhaul_io::timeout(std::time::Duration::from_secs(120), work).await;
        let data = data.expect("no endless wait").unwrap().unwrap();
        assert!(data.bytes() == bytes);
        writer.join().unwrap();
    });
}
