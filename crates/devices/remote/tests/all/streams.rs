//! Servers without ranges: one pass from the beginning.

use blockhaul_block::Kind;

use super::*;

fn without_ranges(object: ServedObject) -> ObjectServer {
    ObjectServer::start(object, |_, _, _| Fault::NoRanges)
}

#[test]
fn a_disk_is_read_in_one_pass() {
    let server = without_ranges(object());
    assert!(all_of(server.url("/")).unwrap() == content(1, SIZE));
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn bytes_that_have_passed_are_refused_and_the_beginning_is_not() {
    let size = (70 << 20) + 5;
    let server = without_ranges(ServedObject::new(content(1, size)));
    let url = server.url("/");
    on_a_worker(move || async move {
        let bytes = content(1, size);
        let stack = open(&url).await.unwrap();
        let end = size as u64 - 5;
        assert!(read(&stack, end, 5).await.unwrap() == bytes[end as usize..]);
        // A little out of order.
        assert!(read(&stack, end - 1000, 1000).await.unwrap() == bytes[size - 1005..size - 5]);
        let error = read(&stack, 4096, 10).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.to_string().contains("have already passed"), "{error}");
        assert!(read(&stack, 0, 100).await.unwrap() == bytes[..100]);
        assert!(read(&stack, 4096, 10).await.unwrap() == bytes[4096..4106]);
        for _ in 0..6 {
            read(&stack, end, 5).await.unwrap();
            read(&stack, 0, 100).await.unwrap();
        }
        read(&stack, end, 5).await.unwrap();
        let error = read(&stack, 0, 100).await.unwrap_err();
        assert!(error.to_string().contains("8 times"), "{error}");
    });
    assert_eq!(server.requests().len(), 8);
}

#[test]
fn a_pass_that_ends_early_begins_again_if_the_object_is_the_same() {
    let cut = |object: ServedObject| {
        ObjectServer::start(object, |number, _, object| match number {
            0 => Fault::Bytes(
                [
                    format!(
                        "HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n{}\r\n",
                        object
                            .lock()
                            .unwrap()
                            .etag
                            .as_ref()
                            .map_or(String::new(), |etag| format!("ETag: {etag}\r\n"))
                    )
                    .into_bytes(),
                    content(1, SIZE)[..150_000].to_vec(),
                ]
                .concat(),
            ),
            _ => Fault::NoRanges,
        })
    };
    let server = cut(object());
    assert!(all_of(server.url("/")).unwrap() == content(1, SIZE));
    let server = cut(ServedObject { etag: None, modified: None, ..object() });
    let error = refused(server.url("/"));
    assert!(error.to_string().contains("nothing tells"), "{error}");
}

#[test]
fn an_object_of_unknown_length_is_refused() {
    for fault in [Fault::Endless, Fault::Chunked, Fault::Http10] {
        let server = ObjectServer::start(object(), move |_, request, _| {
            let is_first = request.field("range").is_some();
            let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
            if is_first { Fault::Bytes(head.as_bytes().to_vec()) } else { fault.clone() }
        });
        let error = refused(server.url("/"));
        assert!(error.to_string().contains("does not tell the size"), "{error}");
    }
}
