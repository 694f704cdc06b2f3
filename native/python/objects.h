/* objects.h -- Part and Held, the two types behind shmcache's memory objects.
 *
 * A Held is what `shmcache._block.Block` is made of. It is made here, part and hold inside, before a call
 * takes a hold for it, so that between the two there is no instant at which an interrupt could lose the
 * hold; and it gives its holds back without a frame of Python. A Part has the fields of a shmc_part. */
#ifndef SHMC_PYTHON_OBJECTS_H
#define SHMC_PYTHON_OBJECTS_H
#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED) && !defined(Py_DEBUG)
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>
#include "shmcache.h"

struct state { PyTypeObject *part, *held; };      /* of the module */

typedef struct { PyObject_HEAD shmc_part part; } part_object;

typedef struct {
    PyObject_HEAD
    shmc *h;        /* the attachment's handle; NULL: made by its __init__ */
    PyObject *attachment, *namespace, *holds, *part, *layout, *more;
} held_object;

/* what an object is made of, as it stands in the arguments of a call */
enum { CLASS, ATTACHMENT, NAMESPACE, LAYOUT, HOLD, OBJECT_ARGUMENTS };

/* objects_ready -- make the types, and add them to the module; -1: an exception is set */
int objects_ready(PyObject *module);
/* object_new -- an object with a part that is still to be filled, so that after the call nothing can fail any more */
held_object *object_new(PyObject *module, shmc *h, PyObject *const *of, PyObject *hold, part_object **part);
/* owner_of -- what a hold holds by; NULL: an exception is set */
shmc_owner *owner_of(PyObject *hold);

#endif
