/* objects.c -- see objects.h. */
#include "objects.h"
#include <structmember.h>

enum { POOLED = 512 };      /* as in shmcache/_attachment.py */

/* ---- Part: where the bytes of one object lie --------------------------------------------------- */

#define FIELD(name, type) {#name, type, offsetof(part_object, part) + offsetof(shmc_part, name), 0, NULL}
static PyMemberDef part_members[] = {
    FIELD(offset, T_ULONGLONG), FIELD(size, T_ULONGLONG), FIELD(extent, T_ULONGLONG), FIELD(block, T_UINT),
    FIELD(gen, T_UINT), FIELD(meta_len, T_UINT), FIELD(published, T_UINT), {NULL, 0, 0, 0, NULL},
};

static PyObject *part_meta(PyObject *self, void *unused)
{
    (void)unused;
    const shmc_part *p = &((part_object *)self)->part;
    return PyBytes_FromStringAndSize((const char *)p->meta, p->meta_len <= SHMC_META_MAX ? p->meta_len : 0);
}

static PyObject *part_address(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(&((part_object *)self)->part);
}

static PyGetSetDef part_getset[] = {
    {"meta", part_meta, NULL, NULL, NULL}, {"address", part_address, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL},
};

static void part_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot part_slots[] = {{Py_tp_members, part_members}, {Py_tp_getset, part_getset}, {Py_tp_dealloc, (void *)part_dealloc}, {0, NULL}};
static PyType_Spec part_spec = {"shmcache._shmfast.Part", sizeof(part_object), 0, Py_TPFLAGS_DEFAULT, part_slots};

/* ---- Held: what `shmcache._block.Block` is made of ----------------------------------------------- */

#define SLOT(name) {"_" #name, T_OBJECT_EX, offsetof(held_object, name), 0, NULL}
static PyMemberDef held_members[] = {
    SLOT(attachment), SLOT(namespace), SLOT(holds), SLOT(part), SLOT(layout), SLOT(more), {NULL, 0, 0, 0, NULL},
};

static int held_traverse(PyObject *self, visitproc visit, void *arg)
{
    held_object *o = (held_object *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(o->attachment);
    Py_VISIT(o->namespace);
    Py_VISIT(o->holds);
    Py_VISIT(o->part);
    Py_VISIT(o->layout);
    Py_VISIT(o->more);
    return 0;
}

static int held_clear(PyObject *self)
{
    held_object *o = (held_object *)self;
    Py_CLEAR(o->holds);
    Py_CLEAR(o->more);
    Py_CLEAR(o->part);
    Py_CLEAR(o->layout);
    Py_CLEAR(o->namespace);
    Py_CLEAR(o->attachment);
    return 0;
}

static void held_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    held_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* What is looked up by name: an attachment's pool of holds, a list's pop, methods of an object. Made once, by
 * the first interpreter that loads the module: one that comes later may go earlier, and take its strings along. */
static PyObject *name_holds, *name_pop, *name_release_slowly, *name_count_down_slowly, *name_not_released, *name_not_counted_down;

static int names(void)
{
    if (name_not_counted_down) return 1;
    return (name_holds = PyUnicode_InternFromString("holds")) && (name_pop = PyUnicode_InternFromString("pop")) &&
           (name_release_slowly = PyUnicode_InternFromString("_release")) && (name_count_down_slowly = PyUnicode_InternFromString("_count_down")) &&
           (name_not_released = PyUnicode_InternFromString("_not_released")) && (name_not_counted_down = PyUnicode_InternFromString("_not_counted_down"));
}

/* A hold without its reference is for the next call, as in Attachment.empty_holds. */
static int pool(PyObject *attachment, PyObject *hold)
{
    PyObject *list = PyObject_GetAttr(attachment, name_holds);
    if (!list) return -1;
    Py_ssize_t n = PyList_Size(list);
    int rc = n < 0 ? -1 : n < POOLED ? PyList_Append(list, hold) : 0;
    Py_DECREF(list);
    return rc;
}

shmc_owner *owner_of(PyObject *hold)
{
    PyObject *at = PyTuple_GetItem(hold, 1);
    return at ? PyLong_AsVoidPtr(at) : NULL;
}

/* Give back what a hold holds, which is off the list of `self` and goes back there when that fails. The fields
 * of an object may change while the GIL is away: the caller keeps these. */
static PyObject *give_back_one(PyObject *self, PyObject *holds, PyObject *attachment, PyObject *hold, PyObject *failed)
{
    shmc *h = ((held_object *)self)->h;
    shmc_owner *owner = owner_of(hold);
    if (PyErr_Occurred()) return NULL;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = shmc_release(h, &owner, 1);
    Py_END_ALLOW_THREADS
    if (rc >= 0) return pool(attachment, hold) ? NULL : (Py_INCREF(Py_None), Py_None);
    PyObject *status = PyList_Append(holds, hold) ? NULL : PyLong_FromLong(rc);
    PyObject *out = status ? PyObject_CallMethodObjArgs(self, failed, status, NULL) : NULL;
    Py_XDECREF(status);
    return out;
}

/* Give back the last hold of an object that is like most; `failed` is its method that takes a status, `slowly`
 * the one for all others. From the moment the hold is off the list it is in `hold`, whose owner gives back
 * by itself what it still has. */
static PyObject *give_back(PyObject *self, Py_ssize_t most, PyObject *failed, PyObject *slowly)
{
    held_object *o = (held_object *)self;
    Py_ssize_t n = o->holds && PyList_Check(o->holds) ? PyList_Size(o->holds) : 0;
    if (n < 1 || n > most || !o->h || !o->attachment || o->more != Py_None) return PyObject_CallMethodObjArgs(self, slowly, NULL);
    PyObject *holds = o->holds, *attachment = o->attachment, *out = NULL;
    Py_INCREF(holds);
    Py_INCREF(attachment);
    PyObject *hold = PyObject_CallMethodObjArgs(holds, name_pop, NULL);
    if (hold) {
        out = give_back_one(self, holds, attachment, hold, failed);
        Py_DECREF(hold);
    } else if (PyErr_ExceptionMatches(PyExc_IndexError)) {      /* without a GIL, another thread may be first */
        PyErr_Clear();
        out = PyObject_CallMethodObjArgs(self, slowly, NULL);
    }
    Py_DECREF(attachment);
    Py_DECREF(holds);
    return out;
}

static PyObject *held_count_down(PyObject *self, PyObject *unused)
{
    (void)unused;
    return give_back(self, PY_SSIZE_T_MAX, name_not_counted_down, name_count_down_slowly);
}

static PyObject *held_release(PyObject *self, PyObject *const *arg, Py_ssize_t given, PyObject *keywords)
{
    Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
    if (given + named > 1 || (named && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(keywords, 0), "after"))) {
        PyErr_SetString(PyExc_TypeError, "release() takes one argument, after");
        return NULL;
    }
    if (given + named && arg[0] != Py_None) return PyObject_CallMethodObjArgs(self, name_release_slowly, arg[0], NULL);
    return give_back(self, 1, name_not_released, name_release_slowly);
}

static PyMethodDef held_methods[] = {
    {"ref_count_down", held_count_down, METH_NOARGS, PyDoc_STR(
        "ref_count_down($self, /)\n--\n\n"
        "Give back one reference of this object; StaleHandleError when it has none.")},
    {"release", (PyCFunction)(void (*)(void))held_release, METH_FASTCALL | METH_KEYWORDS, PyDoc_STR(
        "release($self, after=None)\n--\n\n"
        "Give back all that this object still holds, pins too. Doing it again does nothing.\n\n"
        "Parameters\n----------\nafter\n"
        "    anything with `query()`, such as a `torch.cuda.Event`: the holds are kept until it is\n"
        "    true. The object counts as released at once.\n\n"
        "Raises\n------\nStaleHandleError\n    in a forked child: the holds are the parent's.\n"
        "LockTimeoutError\n    nothing changed; try again.\n")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot held_slots[] = {
    {Py_tp_methods, held_methods},
    {Py_tp_members, held_members}, {Py_tp_traverse, (void *)held_traverse}, {Py_tp_clear, (void *)held_clear},
    {Py_tp_dealloc, (void *)held_dealloc}, {0, NULL},
};
static PyType_Spec held_spec = {"shmcache._shmfast.Held", sizeof(held_object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, held_slots};

held_object *object_new(PyObject *module, shmc *h, PyObject *const *of, PyObject *hold, part_object **part)
{
    struct state *s = PyModule_GetState(module);
    if (!hold) return NULL;
    if (!PyType_Check(of[CLASS]) || !PyType_IsSubtype((PyTypeObject *)of[CLASS], s->held)) {
        PyErr_SetString(PyExc_TypeError, "the class of an object is one below Held");
        return NULL;
    }
    Py_INCREF(hold);        /* of a list, which the collector, and so anybody, may change before it is in its own */
    held_object *o = (held_object *)PyType_GenericAlloc((PyTypeObject *)of[CLASS], 0);
    PyObject *holds = o ? PyList_New(1) : NULL;
    *part = holds ? PyObject_New(part_object, s->part) : NULL;
    if (!*part) {
        Py_DECREF(hold);
        Py_XDECREF(holds);
        Py_XDECREF(o);
        return NULL;
    }
    PyList_SetItem(holds, 0, hold);
    (*part)->part.published = 0;      /* until the call has found it */
    o->h = h;
    o->part = (PyObject *)*part;
    o->holds = holds;
    Py_INCREF(of[ATTACHMENT]);
    o->attachment = of[ATTACHMENT];
    Py_INCREF(of[NAMESPACE]);
    o->namespace = of[NAMESPACE];
    Py_INCREF(of[LAYOUT]);
    o->layout = of[LAYOUT];
    Py_INCREF(Py_None);
    o->more = Py_None;
    return o;
}

int objects_ready(PyObject *module)
{
    struct state *s = PyModule_GetState(module);
    if (!names()) return -1;
    s->part = (PyTypeObject *)PyType_FromSpec(&part_spec);
    if (!s->part || PyModule_AddObjectRef(module, "Part", (PyObject *)s->part)) return -1;
    s->held = (PyTypeObject *)PyType_FromSpec(&held_spec);
    return !s->held || PyModule_AddObjectRef(module, "Held", (PyObject *)s->held) ? -1 : 0;
}
