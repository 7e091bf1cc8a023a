//! Memory of Python objects, through the buffer protocol. Bytes are copied with the interpreter's lock held,
//! so that no thread of Python changes them meanwhile.

use blockhaul_io::{Data, Pool, Reservation};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView, PySlice};

use crate::request::ReadPart;

/// What ranges without data are filled with.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// The memory of an object as bytes. While it exists, the object cannot be resized.
pub(crate) struct ObjectMemory {
    view: Py<PyAny>,
    buffer: PyBuffer<u8>,
}

impl ObjectMemory {
    /// The memory of any object with the buffer protocol that is contiguous.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<ObjectMemory> {
        match PyBuffer::get(object) {
            Ok(buffer) if buffer.dimensions() == 1 && buffer.is_c_contiguous() => {
                Ok(ObjectMemory { view: object.clone().unbind(), buffer })
            }
            // Other elements than bytes, or rows of them.
            _ => {
                let view = PyMemoryView::from(object)?;
                if !view.getattr(intern!(object.py(), "c_contiguous"))?.is_truthy()? {
                    return Err(PyValueError::new_err("the buffer must be contiguous"));
                }
                let view = view.call_method1(intern!(object.py(), "cast"), ("B",))?;
                let buffer = PyBuffer::get(&view)?;
                Ok(ObjectMemory { view: view.unbind(), buffer })
            }
        }
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.buffer.len_bytes()
    }

    pub(crate) fn is_readonly(&self) -> bool {
        self.buffer.readonly()
    }

    /// The memory of a part.
    fn part(&self, py: Python<'_>, at: usize, len: usize) -> PyResult<PyBuffer<u8>> {
        let outside = || PyValueError::new_err("the buffer is too long");
        let end =
            at.checked_add(len).and_then(|end| isize::try_from(end).ok()).ok_or_else(outside)?;
        let at = isize::try_from(at).map_err(|_| outside())?;
        let view = PyMemoryView::from(self.view.bind(py))?;
        PyBuffer::get(&view.get_item(PySlice::new(py, at, end, 1))?)
    }

    /// Fills it with what was read.
    pub(crate) fn fill(&self, py: Python<'_>, parts: &[ReadPart]) -> PyResult<()> {
        if let [part] = parts
            && let Some(bytes) = part.bytes()
        {
            return self.buffer.copy_from_slice(py, bytes);
        }
        let mut at = 0;
        for part in parts {
            match part.bytes() {
                Some(bytes) => self.fill_at(py, at, bytes)?,
                None => self.zero(py, at, part.len())?,
            }
            at += part.len();
        }
        Ok(())
    }

    /// Fills a part of it, which begins at `at`.
    pub(crate) fn fill_at(&self, py: Python<'_>, at: usize, bytes: &[u8]) -> PyResult<()> {
        if at == 0 && bytes.len() == self.len() {
            self.buffer.copy_from_slice(py, bytes)
        } else {
            self.part(py, at, bytes.len())?.copy_from_slice(py, bytes)
        }
    }

    /// Copies it to memory of the same length.
    pub(crate) fn copy_to(&self, py: Python<'_>, into: &mut [u8]) -> PyResult<()> {
        self.buffer.copy_to_slice(py, into)
    }

    /// Zeroes a part.
    fn zero(&self, py: Python<'_>, at: usize, len: usize) -> PyResult<()> {
        let end = at + len;
        for at in (at..end).step_by(ZEROES.len()) {
            let len = ZEROES.len().min(end - at);
            self.part(py, at, len)?.copy_from_slice(py, &ZEROES[..len])?;
        }
        Ok(())
    }

    /// Copies it, in parts of at most `most` bytes.
    fn copied(&self, py: Python<'_>, most: usize, pool: &Pool) -> PyResult<Vec<Data>> {
        let copy = |buffer: &PyBuffer<u8>, len| {
            let mut buf = room(pool, len).into_buf();
            buffer.copy_to_slice(py, &mut buf)?;
            Ok(Data::from(buf))
        };
        if self.len() <= most {
            return Ok(vec![copy(&self.buffer, self.len())?]);
        }
        let parts = (0..self.len()).step_by(most).map(|at| {
            let len = most.min(self.len() - at);
            copy(&self.part(py, at, len)?, len)
        });
        parts.collect()
    }
}

/// Room for `len` bytes, of the pool while that has some: no caller waits for room with some in its hands.
pub(crate) fn room(pool: &Pool, len: usize) -> Reservation {
    pool.try_reserve(len).unwrap_or_else(|| Reservation::unpooled(len))
}

/// Copies an object with the buffer protocol, in parts of at most `most` bytes; nothing if it is empty.
pub(crate) fn copied(object: &Bound<'_, PyAny>, most: usize, pool: &Pool) -> PyResult<Vec<Data>> {
    let Ok(bytes) = object.cast::<PyBytes>() else {
        let memory = ObjectMemory::of(object)?;
        return if memory.len() == 0 {
            Ok(Vec::new())
        } else {
            memory.copied(object.py(), most, pool)
        };
    };
    let copy = |bytes: &[u8]| {
        let mut buf = room(pool, bytes.len()).into_buf();
        buf.copy_from_slice(bytes);
        Data::from(buf)
    };
    Ok(bytes.as_bytes().chunks(most).map(copy).collect())
}

/// What was read, as bytes.
pub(crate) fn bytes_of<'py>(py: Python<'py>, parts: &[ReadPart]) -> PyResult<Bound<'py, PyBytes>> {
    if let [part] = parts
        && let Some(bytes) = part.bytes()
    {
        return Ok(PyBytes::new(py, bytes));
    }
    let len = parts.iter().map(ReadPart::len).sum();
    PyBytes::new_with(py, len, |bytes| {
        let mut rest = bytes;
        for part in parts {
            let (here, after) = rest.split_at_mut(part.len());
            // Other parts are zero already.
            if let Some(bytes) = part.bytes() {
                here.copy_from_slice(bytes);
            }
            rest = after;
        }
        Ok(())
    })
}
