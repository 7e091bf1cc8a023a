//! Requests to the server of an export: a few connections, each kept for the next request.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_client::http::{HttpConnection, HttpServer};
use blockhaul_io::Completer;
use blockhaul_wire::http::HttpResponse;

use crate::map::{ExportMap, PAGE, PAGE_MAX};

/// Attempts at a page of the map, and the pause before the second one; each later one is twice as long.
const PAGE_ATTEMPTS: u32 = 4;
const PAGE_PAUSE: Duration = Duration::from_millis(250);

/// An export: where its requests go, and what they need.
pub(crate) struct HttpExport {
    server: HttpServer,
    /// The path of the disk, without `/map` and `/data`.
    path: String,
    /// The lines of the fields of each request. A secret.
    fields: String,
    state: Mutex<ConnectionPool>,
}

struct ConnectionPool {
    idle: Vec<HttpConnection>,
    /// How many more requests may be under way.
    free: usize,
    waiting: VecDeque<Completer<()>>,
}

impl HttpExport {
    /// An export with this many requests under way at a time.
    pub(crate) fn new(
        server: HttpServer,
        path: String,
        fields: String,
        most: usize,
    ) -> Arc<HttpExport> {
        let state =
            ConnectionPool { idle: Vec::new(), free: most.max(1), waiting: VecDeque::new() };
        Arc::new(HttpExport { server, path, fields, state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionPool> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the whole map.
    pub(crate) async fn map(&self) -> Result<ExportMap> {
        let mut map = ExportMap::default();
        let mut next = Some(0);
        while let Some(at) = next {
            let text = self.page(at).await?;
            next = map.add(&text)?;
        }
        Ok(map)
    }

    /// A page of the map. What may pass is tried again: a large map has many pages.
    async fn page(&self, at: u64) -> Result<Vec<u8>> {
        let mut pause = PAGE_PAUSE;
        for attempt in 1.. {
            let error = match self.page_once(at).await {
                Ok(text) => return Ok(text),
                Err(error) => error,
            };
            let may_pass = matches!(error.kind(), Kind::Io | Kind::Disconnected | Kind::TimedOut);
            if !may_pass || attempt == PAGE_ATTEMPTS {
                return Err(error);
            }
            log::debug!("the map at offset {at}: {error}; trying again");
            blockhaul_io::sleep(pause).await;
            pause = pause.saturating_mul(2);
        }
        Err(Error::new(Kind::Io, "tried again without end"))
    }

    async fn page_once(&self, at: u64) -> Result<Vec<u8>> {
        let target = format!("{}/map?offset={at}&page_size={PAGE}", self.path);
        let mut turn = self.turn().await?;
        let (connection, _) = turn.get(&target).await?;
        let text = connection.text(PAGE_MAX).await?;
        turn.keep();
        Ok(text)
    }

    /// Reads bytes of a disk that has `size` bytes by its map.
    pub(crate) async fn read(&self, size: u64, at: u64, buf: &mut [u8]) -> Result<()> {
        let length = buf.len();
        let target = format!("{}/data?offset={at}&length={length}", self.path);
        let mut turn = self.turn().await?;
        let (connection, answer) = turn.get(&target).await?;
        if let Some(total) = answer.total.filter(|total| *total != size) {
            let text = format!(
                "the disk has {total} bytes (Content-Range), and its map ends at {size}: the map is not \
                 complete"
            );
            return Err(Error::new(Kind::Invalid, text));
        }
        connection.fill(buf).await?;
        turn.keep();
        Ok(())
    }

    /// Waits until another request may be under way.
    async fn turn(&self) -> Result<ExportRequest<'_>> {
        loop {
            let ticket = {
                let mut state = self.lock();
                if state.free > 0 {
                    state.free -= 1;
                    let connection = state.idle.pop();
                    return Ok(ExportRequest { export: self, connection });
                }
                let (completer, ticket) = blockhaul_io::ticket();
                state.waiting.push_back(completer);
                ticket
            };
            // Lost: the one that had this turn is gone; there may be another.
            let _ = ticket.await;
        }
    }
}

/// A request that is under way.
struct ExportRequest<'a> {
    export: &'a HttpExport,
    connection: Option<HttpConnection>,
}

impl ExportRequest<'_> {
    /// Sends a request; the connection with the body of the answer, which is a success, and its head.
    async fn get(&mut self, target: &str) -> Result<(&mut HttpConnection, HttpResponse)> {
        let answer = loop {
            let connection = match &mut self.connection {
                Some(connection) => connection,
                none => none.insert(self.export.server.connect().await?),
            };
            match connection.get(target, &self.export.fields).await {
                Ok(answer) => break answer,
                // The server has closed it while it was idle.
                Err(error) if connection.has_answered() && error.kind() == Kind::Disconnected => {
                    self.connection = None;
                }
                Err(error) => return Err(error),
            }
        };
        let Some(connection) = &mut self.connection else {
            return Err(Error::new(Kind::Disconnected, "no connection"));
        };
        if matches!(answer.status, 200 | 206) {
            return Ok((connection, answer));
        }
        let error = connection.refusal(&answer).await;
        Err(advised(error, &answer))
    }

    /// Keeps the connection for the next request.
    fn keep(&mut self) {
        if let Some(connection) = self.connection.take().filter(HttpConnection::is_reusable) {
            self.export.lock().idle.push(connection);
        }
    }
}

impl Drop for ExportRequest<'_> {
    fn drop(&mut self) {
        let mut state = self.export.lock();
        state.free += 1;
        while let Some(waiting) = state.waiting.pop_front() {
            if !waiting.is_abandoned() {
                drop(state);
                waiting.complete(());
                return;
            }
        }
    }
}

/// Adds what to do.
fn advised(error: Error, answer: &HttpResponse) -> Error {
    let next = match answer.status {
        401 | 403 => {
            "check the token: token-file=FILE with the token of the secret that the backup names"
        }
        404 | 410 => {
            "check the URL, and whether the backup still exists: it ends after its ttlDuration"
        }
        503 => "the export is not connected to the machine, or not yet",
        _ => return error,
    };
    error.with_remedy(next)
}
